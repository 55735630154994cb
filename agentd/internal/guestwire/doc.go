// Package guestwire is the wire form of dormouse.guest.v1, shared by guest init and agentd: frames
// on a FIFO and the messages in them. The format is described in guest.proto.
//
// It exists beside the generated code because guest init is in every sandbox's memory: this
// package needs no reflection, no fmt and no descriptors. A test holds it equal to the generated
// types, both ways.
//
// Everything decoded here may come from an enemy. Sizes are bounded before anything is allocated,
// nothing panics, fields and types that are not known are passed over, and a damaged or torn frame
// costs only itself: the decoder looks for the next one.
package guestwire

// Version is the protocol version that this package speaks.
const Version = 1

// Limits of the channel. A pipe holds 64 KiB, so that a frame always fits in an empty one.
const (
	MaxPayload = 32 << 10
	MaxMessage = 256 << 10
)

// maxRepeated bounds how many messages one field may repeat: more than guest init has processes.
const maxRepeated = 4096

// Type says which message a frame carries; the numbers are guest.proto's.
type Type uint16

// The frame types.
const (
	TypeHello       Type = 1
	TypeWelcome     Type = 2
	TypeRejected    Type = 3
	TypeConfigure   Type = 4
	TypeConfigured  Type = 5
	TypeQuiesce     Type = 6
	TypeQuiesced    Type = 7
	TypeResume      Type = 8
	TypeResumed     Type = 9
	TypePing        Type = 10
	TypePong        Type = 11
	TypeError       Type = 12
	TypeCredit      Type = 13
	TypeStreamClose Type = 14

	TypeStart      Type = 32
	TypeStarted    Type = 33
	TypeList       Type = 34
	TypeListed     Type = 35
	TypeSignal     Type = 36
	TypeSignaled   Type = 37
	TypeWait       Type = 38
	TypeExited     Type = 39
	TypeOutputOpen Type = 40
	TypeOutputData Type = 41
	TypeOutputEnd  Type = 42
	TypeStdinOpen  Type = 43
	TypeStdinData  Type = 44
	TypeStdinClose Type = 45
	TypeStdinState Type = 46
	TypeForget     Type = 47
	TypeForgotten  Type = 48

	TypeResize  Type = 64
	TypeResized Type = 65
)

// wireError is an error without the errors package's help.
type wireError string

func (e wireError) Error() string { return string(e) }

// ErrMalformed says that a payload is not a message of its type.
const ErrMalformed = wireError("guestwire: malformed message")
