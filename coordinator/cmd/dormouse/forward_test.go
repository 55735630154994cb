package main

import "testing"

func TestRules(t *testing.T) {
	for arg, want := range map[string]rule{
		"8080:80": {"127.0.0.1:8080", 80}, "80": {"127.0.0.1:80", 80}, "0:80": {"127.0.0.1:0", 80}, "0.0.0.0:8080:80": {"0.0.0.0:8080", 80},
		"[::1]:8080:80": {"[::1]:8080", 80}, "localhost:1:2": {"localhost:1", 2},
		"": {}, "x": {}, "80:": {}, ":80": {}, "80:0": {}, "80:65536": {}, "65536:80": {}, "-1:80": {}, "a:b:c": {}, "1:2:3:4": {},
	} {
		got, err := ruleOf(arg)
		if (err == nil) != (want != rule{}) || err == nil && got != want {
			t.Errorf("%q: %+v, %v", arg, got, err)
		}
	}
}
