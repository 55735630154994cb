package obs

import (
	"context"
	"fmt"
	"io"
	"log/slog"
)

// LogConfig is the logging part of a daemon's configuration.
type LogConfig struct {
	Level  string `yaml:"level" usage:"debug, info, warn or error"`
	Format string `yaml:"format" usage:"text or json"`
}

// DefaultLog is info, as text.
func DefaultLog() LogConfig { return LogConfig{Level: "info", Format: "text"} }

// NewLogger makes a logger whose lines carry what the context carries.
func NewLogger(w io.Writer, c LogConfig) (*slog.Logger, error) {
	var level slog.Level
	if c.Level != "" {
		if err := level.UnmarshalText([]byte(c.Level)); err != nil {
			return nil, fmt.Errorf("log level %q: debug, info, warn or error", c.Level)
		}
	}
	opts := &slog.HandlerOptions{Level: level}
	switch c.Format {
	case "", "text":
		return slog.New(contextHandler{slog.NewTextHandler(w, opts)}), nil
	case "json":
		return slog.New(contextHandler{slog.NewJSONHandler(w, opts)}), nil
	}
	return nil, fmt.Errorf("log format %q: text or json", c.Format)
}

// Discard is a logger for who does not want one.
func Discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// contextHandler adds the ids of the context to each record.
type contextHandler struct{ slog.Handler }

func (h contextHandler) Handle(ctx context.Context, r slog.Record) error {
	if id := RequestID(ctx); id != "" {
		r.AddAttrs(slog.String("request_id", id))
	}
	if id := OperationID(ctx); id != "" {
		r.AddAttrs(slog.String("operation_id", id))
	}
	r.AddAttrs(attrsOf(ctx)...)
	return h.Handler.Handle(ctx, r)
}

func (h contextHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return contextHandler{h.Handler.WithAttrs(attrs)}
}

func (h contextHandler) WithGroup(name string) slog.Handler {
	return contextHandler{h.Handler.WithGroup(name)}
}
