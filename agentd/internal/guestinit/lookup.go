package guestinit

import (
	"errors"
	"syscall"

	"github.com/dormouse-run/dormouse/agentd/internal/guestwire"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// failure is the reason of a refused request; it implements error.
type failure guestwire.Error

func (f *failure) Error() string { return f.Message }

func fail(reason, message string) *failure { return &failure{Reason: reason, Message: message} }

func (f *failure) with(key, value string) *failure {
	f.DetailKey, f.DetailValue = key, value
	if len(f.DetailValue) > 256 {
		f.DetailValue = f.DetailValue[:256]
	}
	return f
}

// of is with for what the failure is about: the message begins with it.
func (f *failure) of(key, value string) *failure {
	f = f.with(key, value)
	f.Message = f.DetailValue + ": " + f.Message
	return f
}

// lookupCommand finds what to execute: a name with a slash as it stands, relative to the
// directory; any other along PATH.
func lookupCommand(name, dir, path string) (string, *failure) {
	if name == "" {
		return "", fail("COMMAND_NOT_FOUND", "the command is empty").with("command", name)
	}
	for i := range len(name) {
		if name[i] == '/' {
			file := name
			if name[0] != '/' {
				file = dir + "/" + name
			}
			return file, runnable(file, name)
		}
	}
	var denied *failure
	for rest := path; rest != ""; {
		var one string
		if one, rest, _ = cut(rest, ':'); one == "" || one[0] != '/' {
			continue
		}
		file := one + "/" + name
		switch f := runnable(file, name); {
		case f == nil:
			return file, nil
		case f.Reason == "COMMAND_NOT_RUNNABLE" && denied == nil:
			denied = f
		}
	}
	if denied != nil {
		return "", denied
	}
	return "", fail("COMMAND_NOT_FOUND", "the command is in none of the folders of PATH; check its name and the image").of("command", name)
}

func runnable(file, name string) *failure {
	var st syscall.Stat_t
	switch err := syscall.Stat(file, &st); {
	case err == syscall.EACCES:
		return fail("COMMAND_NOT_RUNNABLE", "a folder on the way to the command may not be entered").of("command", name)
	case err != nil:
		return fail("COMMAND_NOT_FOUND", "no such file in the image; check the path").of("command", name)
	case st.Mode&syscall.S_IFMT != syscall.S_IFREG:
		return fail("COMMAND_NOT_RUNNABLE", "the command is not a regular file").of("command", name)
	case st.Mode&0o111 == 0:
		return fail("COMMAND_NOT_RUNNABLE", "the file is not executable; set its x bit, or run it through an interpreter").of("command", name)
	}
	return nil
}

// terminalFailure says what a terminal that could not be made means.
func terminalFailure(err error) *failure {
	var errno syscall.Errno
	_ = errors.As(err, &errno)
	switch errno {
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.ENOSPC:
		return fail("TOO_MANY", "the sandbox has no room for one more terminal; end some processes").with("resource", "terminals")
	}
	return fail("NOT_SUPPORTED", "the sandbox has no terminals at /dev/pts: "+err.Error()).with("feature", "terminal")
}

// execFailure says what a failed fork or exec means.
func execFailure(err error, name string) *failure {
	var errno syscall.Errno
	_ = errors.As(err, &errno)
	switch errno {
	case syscall.ENOENT:
		return fail("COMMAND_NOT_RUNNABLE", "the file is there, but the interpreter or loader that it names is not in the image").of("command", name)
	case syscall.EACCES, syscall.EPERM:
		return fail("COMMAND_NOT_RUNNABLE", "the user may not run the command, or not enter the working directory").of("command", name)
	case syscall.ENOEXEC:
		return fail("COMMAND_NOT_RUNNABLE", "the file is no program for this architecture, and names no interpreter").of("command", name)
	case syscall.E2BIG:
		return fail("LIMIT_EXCEEDED", "the arguments and the environment are too large; pass large input in a file or on standard input").with("field", "args")
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE:
		return fail("TOO_MANY", "the sandbox has no room for one more process; end some, or raise its limits").with("resource", "processes")
	}
	return fail("COMMAND_NOT_RUNNABLE", "the command could not be started: "+err.Error()).of("command", name)
}
