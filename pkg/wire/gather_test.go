package wire

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"testing"
	"time"
)

func serverConfig(t *testing.T) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"peer"}, NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<32, 0)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}, NextProtos: []string{"h2"}, SessionTicketsDisabled: true}
}

// counted counts the writes to a connection.
type counted struct {
	net.Conn
	writes int
}

func (c *counted) Write(p []byte) (int, error) {
	c.writes++
	return c.Conn.Write(p)
}

// pair is a connection with TLS on both sides.
func pair(t *testing.T) (client, server net.Conn, below *counted) {
	t.Helper()
	near, far := net.Pipe()
	below = &counted{Conn: near}
	type result struct {
		conn net.Conn
		err  error
	}
	accepted, cfg := make(chan result, 1), serverConfig(t)
	go func() {
		conn, _, err := TLS(cfg).ServerHandshake(far)
		accepted <- result{conn, err}
	}()
	creds := TLS(&tls.Config{InsecureSkipVerify: true, ServerName: "peer", NextProtos: []string{"h2"}}).Clone() //nolint:gosec // both ends are here
	client, _, err := creds.ClientHandshake(t.Context(), "peer", below)
	r := <-accepted
	if err != nil || r.err != nil {
		t.Fatal(err, r.err)
	}
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	return client, r.conn, below
}

// TestGathered: what is written at once, of many records, is sent at once, and arrives as it was.
func TestGathered(t *testing.T) {
	client, server, below := pair(t)
	content := make([]byte, connBuffer)
	_, _ = rand.Read(content) // never fails
	for _, size := range []int{1, recordBytes, recordBytes + 1, connBuffer} {
		got := make([]byte, size)
		done := make(chan error, 1)
		go func() {
			_, err := io.ReadFull(server, got)
			done <- err
		}()
		before := below.writes
		if n, err := client.Write(content[:size]); n != size || err != nil {
			t.Fatal(n, err)
		}
		if err := <-done; err != nil || !bytes.Equal(got, content[:size]) {
			t.Fatalf("%d bytes: %v", size, err)
		}
		if writes := below.writes - before; size > recordBytes && writes != 1 {
			t.Errorf("%d bytes in %d writes", size, writes)
		}
	}
}

// TestFailedGathering: a write that the connection below did not take has failed.
func TestFailedGathering(t *testing.T) {
	client, _, below := pair(t)
	if err := below.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write(make([]byte, connBuffer)); !errors.Is(err, io.ErrClosedPipe) {
		t.Fatal(err)
	}
}

// TestCloseDoesNotWaitForThePeer: a write that nobody takes is ended by Close.
func TestCloseDoesNotWaitForThePeer(t *testing.T) {
	client, _, _ := pair(t)
	done := make(chan error, 1)
	go func() {
		_, err := client.Write(make([]byte, connBuffer))
		done <- err
	}()
	for !client.(*writer).below.sending.Load() {
		if t.Context().Err() != nil {
			t.Fatal("it never wrote")
		}
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, io.ErrClosedPipe) {
		t.Fatal(err)
	}
}
