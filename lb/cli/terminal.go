package cli

import (
	"io"
	"os"
	"regexp"

	"golang.org/x/sys/unix"
)

// terminalOf returns out if it is a terminal that knows escape sequences, and otherwise nil.
func terminalOf(out io.Writer) *os.File {
	f, ok := out.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return nil
	}
	if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err != nil {
		return nil
	}
	return f
}

// size returns the number of rows and columns of a terminal, or of a common one if it does not tell.
func size(terminal *os.File) (rows, columns int) {
	w, err := unix.IoctlGetWinsize(int(terminal.Fd()), unix.TIOCGWINSZ)
	if err != nil || w.Row == 0 || w.Col == 0 {
		return 24, 80
	}
	return int(w.Row), int(w.Col)
}

// keysAtOnce makes a terminal deliver each key at once and without echo. Ctrl-C still interrupts.
func keysAtOnce(terminal *os.File) (restore func(), err error) {
	fd := int(terminal.Fd())
	was, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return nil, err
	}
	now := *was
	now.Lflag &^= unix.ICANON | unix.ECHO
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &now); err != nil {
		return nil, err
	}
	return func() { unix.IoctlSetTermios(fd, unix.TCSETS, was) }, nil
}

// coloured matches a cell of a table that is only a state, and the verdict at the start of a text.
var coloured = regexp.MustCompile(`(?m)(^|  )(?:(healthy|established|yes|OK)|(unhealthy|down|DOWN)|` +
	`(draining|unknown|offered|idle|connect|active|opensent|openconfirm|DEGRADED))(  |:|, |$)`)

// paint colours the states in a text. Columns keep their widths.
func paint(text string) string {
	return coloured.ReplaceAllStringFunc(text, func(match string) string {
		m := coloured.FindStringSubmatch(match)
		return m[1] + colour("32", m[2]) + colour("31", m[3]) + colour("33", m[4]) + m[5]
	})
}

func colour(code, text string) string {
	if text == "" {
		return ""
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}
