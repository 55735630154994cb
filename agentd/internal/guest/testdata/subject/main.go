// Command subject is what the tests of the guest channel run inside a sandbox.
package main

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func terminalSize() string {
	w, err := unix.IoctlGetWinsize(0, unix.TIOCGWINSZ)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d %d", w.Row, w.Col)
}

func main() {
	if len(os.Args) < 2 {
		os.Exit(2)
	}
	arg := func(i int) string {
		if len(os.Args) > i {
			return os.Args[i]
		}
		return ""
	}
	number := func(i int) int { n, _ := strconv.Atoi(arg(i)); return n }
	switch os.Args[1] {
	case "enter": // mount the pid namespace's own /proc, then become another program
		_ = syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, "")
		if err := syscall.Mount("proc", "/proc", "proc", 0, ""); err != nil {
			fmt.Fprintln(os.Stderr, "mount /proc:", err)
		}
		if err := syscall.Mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666,mode=0620"); err != nil {
			fmt.Fprintln(os.Stderr, "mount /dev/pts:", err)
		}
		// What the test's own parent ignores, as one that runs in the background does, a sandbox does not: what has a
		// handler is what it was by default for who is executed.
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT)
		fmt.Fprintln(os.Stderr, syscall.Exec(os.Args[2], os.Args[2:], os.Environ()))
		os.Exit(1)
	case "exit":
		syscall.Exit(number(2))
	case "echo":
		fmt.Println(strings.Join(os.Args[2:], " "))
		fmt.Fprintln(os.Stderr, "err")
	case "env":
		for _, kv := range os.Environ() {
			fmt.Println(kv)
		}
	case "whoami":
		groups, _ := os.Getgroups()
		slices.Sort(groups)
		dir, _ := os.Getwd()
		status, _ := os.ReadFile("/proc/self/status")
		bounding := ""
		for _, l := range strings.Split(string(status), "\n") {
			if strings.HasPrefix(l, "CapBnd:") {
				bounding = strings.TrimSpace(l[7:])
			}
		}
		sid, _, _ := syscall.RawSyscall(syscall.SYS_GETSID, 0, 0, 0)
		fmt.Println(os.Getuid(), os.Getgid(), groups, dir, int(sid) == os.Getpid(), bounding)
	case "cat":
		_, _ = io.Copy(os.Stdout, os.Stdin)
	case "pour": // n bytes of numbered lines
		w := bufio.NewWriterSize(os.Stdout, 4096)
		for n, i := number(2), 0; n > 0; i++ {
			k, _ := fmt.Fprintf(w, "%015d\n", i)
			n -= k
		}
		_ = w.Flush()
	case "digest": // of n bytes of input
		fmt.Println("ready")
		sum := sha256.New()
		n, err := io.CopyN(sum, os.Stdin, int64(number(2)))
		if err != nil {
			fmt.Println(n, err)
		}
		fmt.Printf("%x\n", sum.Sum(nil))
	case "count": // a line every few milliseconds, for ever
		for i := 0; ; i++ {
			fmt.Println(os.Getpid(), i)
			time.Sleep(5 * time.Millisecond)
		}
	case "sleep":
		time.Sleep(time.Hour)
	case "signal": // report the first signal
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, syscall.SIGUSR1)
		fmt.Println("ready")
		fmt.Println("got", <-ch)
	case "tree": // a child that leads its own session, and one that does not
		for _, own := range []bool{false, true} {
			c := exec.Command("/bin/subject", "sleep")
			c.SysProcAttr = &syscall.SysProcAttr{Setsid: own}
			c.Stdout = os.Stdout
			if err := c.Start(); err != nil {
				fmt.Println(err)
			}
		}
		fmt.Println("ready")
		time.Sleep(time.Hour)
	case "daemon": // leave one behind that leads its own session and has no parent any more
		c := exec.Command("/bin/subject", "between")
		c.Stdout = os.Stdout
		fmt.Println(c.Run())
		time.Sleep(time.Hour)
	case "between":
		c := exec.Command("/bin/subject", "sleep")
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		fmt.Println(c.Start())
	case "tty": // what the terminal is
		fmt.Println(terminalSize())
		group, err := unix.IoctlGetInt(0, unix.TIOCGPGRP)
		fmt.Println(group == os.Getpid(), err, os.Getenv("TERM"))
		var st syscall.Stat_t
		fmt.Println(syscall.Fstat(1, &st), st.Uid, st.Mode&syscall.S_IFMT == syscall.S_IFCHR)
		_, err = os.OpenFile("/dev/tty", os.O_RDWR, 0)
		fmt.Println(err)
	case "winch": // the size, and again at each SIGWINCH
		ch := make(chan os.Signal, 16)
		signal.Notify(ch, syscall.SIGWINCH)
		for {
			fmt.Println(terminalSize())
			<-ch
		}
	case "raw": // make the terminal raw, then do another thing
		termios, err := unix.IoctlGetTermios(0, unix.TCGETS)
		if err == nil {
			termios.Oflag &^= unix.OPOST
			termios.Iflag &^= unix.ICRNL | unix.IXON
			termios.Lflag &^= unix.ECHO | unix.ICANON | unix.ISIG | unix.IEXTEN
			err = unix.IoctlSetTermios(0, unix.TCSETS, termios)
		}
		if err != nil {
			fmt.Println(err)
		}
		os.Args = append(os.Args[:1], os.Args[2:]...)
		main()
	case "orphan": // leave a child behind that ends soon
		c := exec.Command("/bin/subject", "sleep")
		c.Stdout = os.Stdout
		_ = c.Start()
		fmt.Println(c.Process.Pid)
	case "killinit":
		fmt.Println(syscall.Kill(1, syscall.SIGTERM))
	case "read":
		data, err := os.ReadFile(arg(2))
		fmt.Print(string(data))
		if err != nil {
			fmt.Println(err)
		}
	case "pids": // how many there are
		entries, _ := os.ReadDir("/proc")
		n := 0
		for _, e := range entries {
			if _, err := strconv.Atoi(e.Name()); err == nil {
				n++
			}
		}
		fmt.Println(n)
	case "hostname":
		name, _ := os.Hostname()
		fmt.Println(name)
	}
}
