package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// maxDepth bounds the nesting of a request's JSON.
const maxDepth = 64

// UnmarshalJSON reads one JSON object into a message. A key that the message does not have is
// refused with UNKNOWN_FIELD, which names its whole path; so is a key given twice, and anything
// after the object.
func UnmarshalJSON(data []byte, into proto.Message) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	if err := checkMessage(dec, into.ProtoReflect().Descriptor(), "", 0); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return badJSON("", "there is more after the object")
	}
	if err := protojson.Unmarshal(data, into); err != nil {
		return errs.Wrap(err, errs.InvalidField, "the body does not fit the request: %s", protoText(err))
	}
	return nil
}

// MarshalJSON gives a message as the REST API shows it: proto field names, enums by name.
func MarshalJSON(m proto.Message) ([]byte, error) {
	return protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
}

// protoText strips the prefix that protojson gives its errors, whose spaces vary by build.
func protoText(err error) string {
	text := strings.ReplaceAll(err.Error(), "\u00a0", " ")
	return strings.TrimSpace(strings.TrimPrefix(text, "proto:"))
}

func badJSON(path, format string, args ...any) *errs.Error {
	e := errs.New(errs.InvalidField, "the body is not the JSON that was expected: %s", fmt.Sprintf(format, args...))
	if path != "" {
		e = e.With("field", path)
	}
	return e
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// scalarForm tells whether the message's JSON is not an object of its fields.
func scalarForm(d protoreflect.MessageDescriptor) bool {
	return d.ParentFile().Package() == "google.protobuf"
}

// checkMessage reads one value and checks the keys of the objects in it against the descriptor.
func checkMessage(dec *json.Decoder, d protoreflect.MessageDescriptor, path string, depth int) error {
	if depth > maxDepth {
		return badJSON(path, "nested too deeply")
	}
	if scalarForm(d) {
		return skip(dec, path)
	}
	t, err := dec.Token()
	switch {
	case err != nil:
		return badJSON(path, "%v", err)
	case t == nil && path != "":
		return nil // null leaves a field unset
	case t != json.Delim('{'):
		return badJSON(path, "an object is expected here")
	}
	seen := make(map[protoreflect.Name]bool)
	for dec.More() {
		key, err := objectKey(dec, path)
		if err != nil {
			return err
		}
		f := d.Fields().ByJSONName(key)
		if f == nil {
			f = d.Fields().ByName(protoreflect.Name(key))
		}
		if f == nil {
			return unknownField(join(path, key), d)
		}
		if seen[f.Name()] {
			return badJSON(join(path, key), "%s is given twice", join(path, key))
		}
		seen[f.Name()] = true
		if err := checkField(dec, f, join(path, string(f.Name())), depth+1); err != nil {
			return err
		}
	}
	if _, err := dec.Token(); err != nil {
		return badJSON(path, "%v", err)
	}
	return nil
}

func unknownField(path string, d protoreflect.MessageDescriptor) *errs.Error {
	var names []string
	for i := range d.Fields().Len() {
		names = append(names, string(d.Fields().Get(i).Name()))
	}
	return errs.New(errs.UnknownField, "%s: there is no such field; here are %s", path, strings.Join(names, ", ")).With("field", path)
}

func objectKey(dec *json.Decoder, path string) (string, error) {
	t, err := dec.Token()
	if err != nil {
		return "", badJSON(path, "%v", err)
	}
	key, ok := t.(string)
	if !ok {
		return "", badJSON(path, "a key is expected here")
	}
	return key, nil
}

func checkField(dec *json.Decoder, f protoreflect.FieldDescriptor, path string, depth int) error {
	switch {
	case f.IsMap():
		if f.MapValue().Message() == nil {
			return skip(dec, path)
		}
		return each(dec, path, func(key string) error { return checkMessage(dec, f.MapValue().Message(), join(path, key), depth) })
	case f.Message() == nil:
		return skip(dec, path)
	case f.IsList():
		n := 0
		return each(dec, path, func(string) error {
			n++
			return checkMessage(dec, f.Message(), fmt.Sprintf("%s[%d]", path, n-1), depth)
		})
	}
	return checkMessage(dec, f.Message(), path, depth)
}

// each reads an object or an array and calls one for each value in it.
func each(dec *json.Decoder, path string, one func(key string) error) error {
	t, err := dec.Token()
	switch {
	case err != nil:
		return badJSON(path, "%v", err)
	case t == nil:
		return nil
	case t != json.Delim('{') && t != json.Delim('['):
		return badJSON(path, "an object or a list is expected here")
	}
	for dec.More() {
		key := ""
		if t == json.Delim('{') {
			if key, err = objectKey(dec, path); err != nil {
				return err
			}
		}
		if err := one(key); err != nil {
			return err
		}
	}
	if _, err := dec.Token(); err != nil {
		return badJSON(path, "%v", err)
	}
	return nil
}

// skip reads one value of any form; protojson judges it.
func skip(dec *json.Decoder, path string) error {
	var v json.RawMessage
	if err := dec.Decode(&v); err != nil {
		return badJSON(path, "%v", err)
	}
	return nil
}
