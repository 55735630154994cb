// Command web shows what a client without gRPC has: the REST API, a process over a WebSocket, and a server inside over HTTP.
//
//	DORMOUSE_REST=https://... DORMOUSE_API_KEY=... go run ./examples/web IMAGE
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/coder/websocket"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: web IMAGE")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := show(ctx, newAPI(os.Getenv("DORMOUSE_REST"), os.Getenv("DORMOUSE_API_KEY")), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "web:", err)
		os.Exit(1)
	}
}

func show(ctx context.Context, a *api, image string) (err error) {
	var made struct {
		Sandbox struct{ Meta struct{ UID string } }
	}
	spec := map[string]any{"image": image, "exposed_ports": []int{8080}}
	if err := a.call(ctx, "POST", "/v1/sandboxes", map[string]any{"spec": spec}, &made); err != nil {
		return err
	}
	sandbox := "/v1/sandboxes/" + made.Sandbox.Meta.UID
	defer func() { err = errors.Join(err, a.call(context.WithoutCancel(ctx), "DELETE", sandbox, nil, nil)) }()

	if err := process(ctx, a, sandbox); err != nil {
		return err
	}
	server := map[string]any{"shell": "mkdir -p /www; echo hello from inside > /www/index.html; exec httpd -f -p 127.0.0.1:8080 -h /www"}
	if err := a.call(ctx, "POST", sandbox+"/processes", map[string]any{"spec": server}, nil); err != nil {
		return err
	}
	for {
		resp, err := a.do(ctx, "GET", sandbox+"/ports/8080/", nil)
		if err != nil {
			return err
		}
		page, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close() // it is read
		if err != nil {
			return err
		}
		if resp.Header.Get("Dormouse-Error") != "PORT_CLOSED" { // it listens
			fmt.Print("the page: ", string(page))
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// process starts a process, types to it, and says what it answers and how it ends.
func process(ctx context.Context, a *api, sandbox string) error {
	conn, _, err := websocket.Dial(ctx, a.base+sandbox+"/attach", &websocket.DialOptions{ //nolint:bodyclose // it needs no closing, by its contract
		HTTPClient: a.client, HTTPHeader: http.Header{"Authorization": {"Bearer " + a.key}}, Subprotocols: []string{"dormouse.attach.v1"},
	})
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseNow() }() // the process's end has closed it, or nobody wants it
	conn.SetReadLimit(1 << 20)
	start := `{"start": {"spec": {"shell": "read name; echo hello $name; exit 3", "stdin": true}}}`
	if err := conn.Write(ctx, websocket.MessageText, []byte(start)); err != nil {
		return err
	}
	if err := conn.Write(ctx, websocket.MessageBinary, []byte("\x00dormouse\n")); err != nil {
		return err
	}
	for {
		kind, data, err := conn.Read(ctx)
		if err != nil {
			return err
		}
		if kind == websocket.MessageBinary { // 1 is stdout, 2 is stderr
			fmt.Printf("channel %d: %s", data[0], data[1:])
			continue
		}
		var event struct {
			Exit  *struct{ Code int }
			Error *struct{ Reason, Message string }
		}
		if err := json.Unmarshal(data, &event); err != nil {
			return err
		}
		if e := event.Error; e != nil {
			return fmt.Errorf("%s: %s", e.Reason, e.Message)
		}
		if event.Exit != nil {
			fmt.Println("it ended with", event.Exit.Code)
			return nil
		}
	}
}

// api is the REST API.
type api struct {
	base, key string
	client    *http.Client
}

// newAPI takes a URL, or unix:// and the path of a socket.
func newAPI(base, key string) *api {
	a := &api{base: strings.TrimSuffix(base, "/"), key: key, client: &http.Client{}}
	if path, ok := strings.CutPrefix(base, "unix://"); ok {
		a.base = "http://dormouse"
		a.client.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}}
	}
	return a
}

func (a *api) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, a.base+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+a.key)
	return a.client.Do(req)
}

// call sends an object and reads the answer into another.
func (a *api) call(ctx context.Context, method, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	if in == nil {
		body = nil
	}
	resp, err := a.do(ctx, method, path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s", method, path, data)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(data, out)
}
