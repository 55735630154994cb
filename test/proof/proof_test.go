package proof

import "testing"

func answer() Answer {
	return Answer{PID: 7, StartTicks: "12", Born: 1.5, Nonce: "n", Counter: 3, HeapBytes: 9, HeapSHA256: "h", FileOffset: 4196,
		FileSHA256: "f", TCPFrames: 3, TCPPort: 4000, VolumeUID: "v", JournalLines: 3}
}

func following(a Answer) Answer {
	a.Counter++
	a.FileOffset += bytesPerAnswer
	a.TCPFrames++
	a.JournalLines++
	return a
}

func TestNextAnswerOfOneProcess(t *testing.T) {
	if bad := Failed(Compare(answer(), following(answer()))); len(bad) > 0 {
		t.Fatalf("refused: %v", bad)
	}
}

func TestAnotherProcessIsSeen(t *testing.T) {
	for name, forge := range map[string]func(*Answer){
		"pid":         func(a *Answer) { a.PID++ },
		"start":       func(a *Answer) { a.StartTicks = "13" },
		"born":        func(a *Answer) { a.Born++ },
		"nonce":       func(a *Answer) { a.Nonce = "m" },
		"counter":     func(a *Answer) { a.Counter = 1 },
		"replayed":    func(a *Answer) { a.Counter-- },
		"heap":        func(a *Answer) { a.HeapSHA256 = "g" },
		"offset":      func(a *Answer) { a.FileOffset = 4196 },
		"file":        func(a *Answer) { a.FileSHA256 = "g" },
		"stream":      func(a *Answer) { a.TCPFrames = 1 },
		"port":        func(a *Answer) { a.TCPPort++ },
		"volume":      func(a *Answer) { a.VolumeUID = "w" },
		"journal":     func(a *Answer) { a.JournalLines = 1 },
		"empty nonce": func(a *Answer) { a.Nonce = "" },
	} {
		after := following(answer())
		forge(&after)
		if len(Failed(Compare(answer(), after))) == 0 {
			t.Errorf("%s: a forged answer passed", name)
		}
	}
}

func TestAnErrorIsNoAnswer(t *testing.T) {
	for _, out := range []string{"", "{", `{"error":"broken"}`} {
		if _, err := Parse([]byte(out)); err == nil {
			t.Errorf("%q passed for an answer", out)
		}
	}
}
