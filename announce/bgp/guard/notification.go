package guard

import (
	"bytes"
	"fmt"
	"unicode/utf8"

	"github.com/steelyard-lb/steelyard/lb/printable"
)

// Error codes of NOTIFICATION (RFC 4271, section 4.5).
const (
	codeHeader    = 1
	codeOpen      = 2
	codeHoldTimer = 4
	codeFSM       = 5
	codeCease     = 6
)

// Subcodes of CEASE (RFC 4486; RFC 9384 for BFD).
const (
	ceaseShutdown     = 2
	ceaseDeconfigured = 3
	ceaseChanged      = 6
	ceaseCollision    = 7
	ceaseResources    = 8
	ceaseBFD          = 10
)

// codeNames and subcodeNames are from the IANA registry "BGP Error (Notification) Codes", in lower case.
var (
	codeNames = map[uint8]string{
		1: "message header error", 2: "open message error", 3: "update message error", 4: "hold timer expired",
		5: "finite state machine error", 6: "cease", 7: "route-refresh message error",
	}
	subcodeNames = map[uint8][]string{
		1: {"", "connection not synchronized", "bad message length", "bad message type"},
		2: {"", "unsupported version number", "bad peer as", "bad bgp identifier", "unsupported optional parameter",
			"", "unacceptable hold time", "unsupported capability", "", "", "", "role mismatch"},
		3: {"", "malformed attribute list", "unrecognized well-known attribute", "missing well-known attribute",
			"attribute flags error", "attribute length error", "invalid origin attribute", "",
			"invalid next_hop attribute", "optional attribute error", "invalid network field", "malformed as_path"},
		5: {"", "unexpected message in opensent", "unexpected message in openconfirm",
			"unexpected message in established"},
		6: {"", "maximum number of prefixes reached", "administrative shutdown", "peer de-configured",
			"administrative reset", "connection rejected", "other configuration change",
			"connection collision resolution", "out of resources", "hard reset", "bfd down"},
		7: {"", "invalid message length"},
	}
)

// Error is a NOTIFICATION that ends a session. It was received from the peer or is sent to it.
type Error struct {
	Code, Subcode uint8
	Data          []byte
	Text          string // what is wrong, unless received
	Received      bool
}

// protocolError returns an error to send to the peer. data is copied.
func protocolError(code, subcode uint8, data []byte, format string, args ...any) *Error {
	return &Error{Code: code, Subcode: subcode, Data: bytes.Clone(data), Text: fmt.Sprintf(format, args...)}
}

// cease returns a CEASE. For ceaseShutdown, it contains text as the shutdown communication (RFC 9003).
func cease(subcode uint8, text string) *Error {
	e := protocolError(codeCease, subcode, nil, "%s", text)
	if subcode == ceaseShutdown {
		text = text[:min(len(text), 255)]
		e.Data = append([]byte{byte(len(text))}, text...)
	}
	return e
}

// Error returns the text, sent or received, with the names and numbers of the code and subcode.
func (e *Error) Error() string {
	name, found := codeNames[e.Code]
	if names := subcodeNames[e.Code]; int(e.Subcode) < len(names) && names[e.Subcode] != "" {
		name, found = names[e.Subcode], true
	}
	if !found {
		name = "unknown error"
	}
	name = fmt.Sprintf("%s (code %d, subcode %d)", name, e.Code, e.Subcode)
	if !e.Received {
		if e.Text == "" {
			return "sent NOTIFICATION: " + name
		}
		return fmt.Sprintf("%s; sent NOTIFICATION: %s", e.Text, name)
	}
	text := "received NOTIFICATION: " + name
	if words := e.communication(); words != "" {
		text += fmt.Sprintf(" %q", words)
	}
	if e.Code == codeOpen && e.Subcode == 2 {
		text += ": the peer expects an AS number other than asn or local_asn here"
	}
	return text
}

// communication returns the text of an administrative shutdown or reset (RFC 9003).
func (e *Error) communication() string {
	if e.Code != codeCease || e.Subcode != ceaseShutdown && e.Subcode != 4 || len(e.Data) == 0 {
		return ""
	}
	n := int(e.Data[0])
	if n > len(e.Data)-1 || !utf8.Valid(e.Data[1:1+n]) {
		return ""
	}
	return printable.Cut(string(e.Data[1 : 1+n]))
}

// message returns the NOTIFICATION to send.
func (e *Error) message() []byte {
	data := e.Data[:min(len(e.Data), maxMessage-headerLen-2)]
	return encode(typeNotification, append([]byte{e.Code, e.Subcode}, data...))
}

// parseNotification returns a received NOTIFICATION. Any body of at least two bytes is valid, because errors in a
// NOTIFICATION are not reported to the peer (RFC 4271, section 6.4).
func parseNotification(body []byte) *Error {
	return &Error{Code: body[0], Subcode: body[1], Data: bytes.Clone(body[2:]), Received: true}
}
