package memory_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/dormouse-run/dormouse/pkg/catalog"
	"github.com/dormouse-run/dormouse/pkg/catalog/catalogtest"
	"github.com/dormouse-run/dormouse/pkg/catalog/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	catalogtest.Run(t, func(t *testing.T, r catalog.Retention) catalog.Store {
		s := memory.New(memory.Options{Retention: r})
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
		return s
	})
}
