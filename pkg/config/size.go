package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Bytes is a size that reads 512Mi, 1.5Gi, 100M or 4096.
type Bytes int64

var units = []struct {
	suffix string
	factor float64
}{
	{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40},
	{"k", 1e3}, {"K", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12},
}

// ParseBytes reads a size: a number with Ki, Mi, Gi, Ti (powers of 1024), k, M, G, T (powers of
// 1000), an optional B after those, or no unit for bytes.
func ParseBytes(text string) (int64, error) {
	s, factor := strings.TrimSpace(text), 1.0
	if t := strings.TrimSuffix(s, "B"); t != s {
		s = t
	}
	for _, u := range units {
		if t, ok := strings.CutSuffix(s, u.suffix); ok {
			s, factor = t, u.factor
			break
		}
	}
	if factor == 1 {
		if n, err := strconv.ParseInt(s, 10, 64); err == nil && n >= 0 {
			return n, nil
		}
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil || f < 0 || math.IsNaN(f) || f*factor >= math.MaxInt64 || f*factor != math.Trunc(f*factor) {
		return 0, fmt.Errorf("%q is not a size; write 512Mi, 1.5Gi, 100M or a number of bytes", text)
	}
	return int64(f * factor), nil
}

// FormatBytes shows a size in the largest binary unit that keeps one decimal.
func FormatBytes(n int64) string {
	for _, u := range []struct {
		suffix string
		factor int64
	}{{"Ti", 1 << 40}, {"Gi", 1 << 30}, {"Mi", 1 << 20}, {"Ki", 1 << 10}} {
		if n >= u.factor || n <= -u.factor {
			return strings.TrimSuffix(strconv.FormatFloat(float64(n)/float64(u.factor), 'f', 1, 64), ".0") + u.suffix
		}
	}
	return strconv.FormatInt(n, 10)
}

// ParseMillis reads an amount of CPU in thousandths of a core: 500m, 0.5 or 2.
func ParseMillis(text string) (int64, error) {
	s := strings.TrimSpace(text)
	if t, ok := strings.CutSuffix(s, "m"); ok {
		n, err := strconv.ParseInt(t, 10, 64)
		if err == nil && n >= 0 {
			return n, nil
		}
	} else if f, err := strconv.ParseFloat(s, 64); err == nil && f >= 0 && f < 1e9 && !math.IsNaN(f) {
		if m := math.Round(f * 1000); math.Abs(m-f*1000) < 1e-6 {
			return int64(m), nil
		}
	}
	return 0, fmt.Errorf("%q is not an amount of CPU; write 500m, 0.5 or 2", text)
}

// UnmarshalText reads what ParseBytes reads.
func (b *Bytes) UnmarshalText(text []byte) error {
	n, err := ParseBytes(string(text))
	if err != nil {
		return err
	}
	*b = Bytes(n)
	return nil
}

// MarshalText writes the exact number of bytes, or a binary unit that is exact.
func (b Bytes) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

func (b Bytes) String() string {
	if s := FormatBytes(int64(b)); b >= 1<<10 {
		if n, err := ParseBytes(s); err == nil && n == int64(b) {
			return s
		}
	}
	return strconv.FormatInt(int64(b), 10)
}
