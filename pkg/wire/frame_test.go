package wire

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"

	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// TestFramesAndMessages: what one writes the other reads, of any size, and a Frame passes it on as it is.
func TestFramesAndMessages(t *testing.T) {
	for _, size := range []int{0, 1, 1<<smallest - 8, 1 << smallest, 124 << 10, 1 << piece, 1 << largest, 3 << largest} {
		want := &dormousev1.ReadFileResponse{Event: &dormousev1.ReadFileResponse_Data{Data: bytes.Repeat([]byte("x"), size)}}
		sent, err := codec.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		var f Frame
		if err := codec.Unmarshal(sent, &f); err != nil {
			t.Fatal(err)
		}
		sent.Free()
		passed, err := codec.Marshal(&f)
		if err != nil {
			t.Fatal(err)
		}
		got := &dormousev1.ReadFileResponse{}
		if err := codec.Unmarshal(passed, got); err != nil {
			t.Fatal(err)
		}
		passed.Free()
		if !proto.Equal(got, want) {
			t.Errorf("%d bytes came as %d, or others", size, len(got.GetData()))
		}
	}
	if codec.Name() != "proto" {
		t.Errorf("the codec is called %q", codec.Name())
	}
	if _, err := codec.Marshal(5); err == nil {
		t.Error("a number is no message")
	}
}
