package runtime

import (
	"strings"

	"github.com/dormouse-run/dormouse/pkg/errs"
)

// CheckID tells whether the text is a sandbox id: a lower-case UUID. Ids become names of files and
// groups, so a driver checks each before it does anything.
func CheckID(id string) error {
	if len(id) != IDLen || strings.ContainsFunc(id, func(r rune) bool {
		return r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'f')
	}) {
		return errs.New(errs.InvalidField, "%q is not a sandbox uid", id).With("field", "uid")
	}
	return nil
}
