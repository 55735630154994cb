package app_test

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dormouse-run/dormouse/coordinator/app"
	"github.com/dormouse-run/dormouse/pkg/pki"
	dormousev1 "github.com/dormouse-run/dormouse/proto/dormouse/v1"
)

// TestIfMatchOverREST: an update is made of what was read or not at all, whichever coordinator is asked, with the revision in the body or in
// the header.
func TestIfMatchOverREST(t *testing.T) {
	r := newRig(t, func(c *app.Config) { c.Lease.TTL = 20 * time.Second })
	r.node("n1")
	u := r.create("one")
	cfg := r.cfg
	cfg.Admin, cfg.Holder = "", "standby"
	leader, standby := r.app, startStandby(t, r, cfg)
	defer standby.Stop()
	tr := &http.Transport{TLSClientConfig: mustOpen(t, pki.Files{CA: r.cfg.TLS.CA}).Client(pki.RoleCoordinator, "")}
	defer tr.CloseIdleConnections()
	update := func(a *app.App, match, labels, more string) (int, string) {
		t.Helper()
		req, err := http.NewRequest("PATCH", "https://"+a.Addresses("rest")[0]+"/v1/sandboxes/"+u, strings.NewReader(`{"updateMask": "labels", "labels": `+labels+more+`}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+r.user)
		if match != "" {
			req.Header.Set("If-Match", match)
		}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		var answer struct{ Reason string }
		if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, answer.Reason
	}
	read := func() *dormousev1.ObjectMeta {
		t.Helper()
		got, err := dormousev1.NewSandboxServiceClient(r.conn(r.user)).GetSandbox(context.Background(), &dormousev1.GetSandboxRequest{Uid: u})
		if err != nil {
			t.Fatal(err)
		}
		return got.GetSandbox().GetMeta()
	}
	for who, a := range map[string]*app.App{"the leader": leader, "the standby": standby} {
		first := strconv.FormatUint(read().GetRevision(), 10)
		if code, reason := update(a, `"`+first+`"`, `{"by": "header"}`, ""); code != http.StatusOK || read().GetLabels()["by"] != "header" {
			t.Fatalf("%s, with the header: %d %s", who, code, reason)
		}
		second := strconv.FormatUint(read().GetRevision(), 10)
		for name, c := range map[string]struct {
			match, more string
			code        int
			reason      string
		}{
			"stale header":    {first, "", 409, "STALE_REVISION"},
			"stale field":     {"", `, "ifRevision": "` + first + `"`, 409, "STALE_REVISION"},
			"no revision":     {`"an-etag"`, "", 400, "INVALID_FIELD"},
			"zero":            {"0", "", 400, "INVALID_FIELD"},
			"anything":        {"*", "", 400, "INVALID_FIELD"},
			"a field over it": {second, `, "ifRevision": "` + first + `"`, 409, "STALE_REVISION"},
		} {
			if code, reason := update(a, c.match, `{"by": "nobody"}`, c.more); code != c.code || reason != c.reason {
				t.Errorf("%s, %s: %d %s", who, name, code, reason)
			}
		}
		if code, reason := update(a, second, `{"by": "number"}`, ""); code != http.StatusOK {
			t.Errorf("%s, without quotes: %d %s", who, code, reason)
		}
		if code, reason := update(a, "", `{"by": "anyone"}`, ""); code != http.StatusOK || read().GetLabels()["by"] != "anyone" {
			t.Errorf("%s, without a condition: %d %s", who, code, reason)
		}
	}
}
