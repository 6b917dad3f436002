package agent

import (
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
)

// keep stores the active configuration's text for the operator and for the next start.
func (l *reloader) keep(now *loadState) { l.kept(l.history.Add(now.text, now.at)) }

// text returns the text of the active file.
func (l *reloader) text() string { return l.state.Load().text }

// pools returns the pools of the active configuration.
func (l *reloader) pools() []lb.Pool { return l.state.Load().pools }

// findings reports a file other than the active one, which the next start or reload would use. A rejected file has its
// own finding.
func (l *reloader) findings() []lb.Finding {
	now := l.state.Load()
	if t := now.trial; t != nil {
		return []lb.Finding{lb.FoundUnconfirmed.About(l.file,
			"the active configuration ends at %s unless it is confirmed", t.until.Format(time.TimeOnly))}
	}
	text, err := config.Read(l.file)
	switch {
	case err != nil && now.refused == "":
		return []lb.Finding{lb.FoundFileChanged.About(l.file, "%v", err)}
	case err == nil && string(text) != now.text && (now.refused == "" || string(text) != now.refusedText):
		return []lb.Finding{lb.FoundFileChanged.About(l.file, "%s has changed since it was loaded", l.file)}
	}
	return nil
}
