// Package browser opens pages in headless Chromium, to test pages with what users see them in. It speaks the Chrome
// DevTools Protocol through pipes (https://chromedevtools.github.io/devtools-protocol).
package browser

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
)

// Path returns the path of Chromium or Chrome.
func Path() (string, error) {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("there is neither chromium nor google-chrome")
}

// Page is a browser with one page. Its methods may be called from any goroutine.
type Page struct {
	cmd     *exec.Cmd
	to      io.WriteCloser
	session string
	done    chan struct{} // closed when the browser has ended

	mu       sync.Mutex // guards the following fields
	last     int        // ID of the last call
	calls    map[int]chan message
	problems []string
}

// message is a call, its result, or an event.
type message struct {
	ID      int             `json:"id,omitempty"`
	Session string          `json:"sessionId,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  any             `json:"params,omitempty"`
	Result  json.RawMessage `json:"result,omitempty"`
	Error   *struct {
		Message string `json:"message"`
	} `json:"error,omitempty"`
}

// Start starts the browser at path with an empty profile in dir. It ends with this process. Start calls do with the
// function that starts the process, so that do can choose the network namespace.
func Start(ctx context.Context, path, dir string, do func(func() error) error) (*Page, error) {
	in, to, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	from, out, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, in.Close(), to.Close())
	}
	// Root has no sandbox, and /dev/shm of a container may be small.
	p := &Page{to: to, done: make(chan struct{}), calls: map[int]chan message{}}
	p.cmd = exec.Command(path, "--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
		"--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe", "--user-data-dir="+dir)
	p.cmd.ExtraFiles = []*os.File{in, out} // 3 and 4, where the browser expects them
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = errors.Join(do(p.cmd.Start), in.Close(), out.Close())
	if err != nil {
		return nil, errors.Join(err, to.Close(), from.Close())
	}
	go p.read(from)
	var target struct {
		ID string `json:"targetId"`
	}
	var session struct {
		ID string `json:"sessionId"`
	}
	err = p.Call(ctx, "Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	if err == nil {
		attach := map[string]any{"targetId": target.ID, "flatten": true}
		err = p.Call(ctx, "Target.attachToTarget", attach, &session)
	}
	p.session = session.ID
	for _, domain := range []string{"Page", "Runtime", "Log"} {
		if err == nil {
			err = p.Call(ctx, domain+".enable", nil, nil)
		}
	}
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// Call calls a method of the protocol. result may be nil.
func (p *Page) Call(ctx context.Context, method string, params, result any) error {
	answer := make(chan message, 1)
	p.mu.Lock()
	p.last++
	id := p.last
	p.calls[id] = answer
	text, err := json.Marshal(message{ID: id, Session: p.session, Method: method, Params: params})
	if err == nil {
		_, err = p.to.Write(append(text, 0))
	}
	p.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case m := <-answer:
		switch {
		case m.Error != nil:
			return fmt.Errorf("%s: %s", method, m.Error.Message)
		case result == nil:
			return nil
		}
		return json.Unmarshal(m.Result, result)
	case <-p.done:
		return fmt.Errorf("%s: the browser has ended", method)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", method, ctx.Err())
	}
}

// read passes results to their calls until the browser ends.
func (p *Page) read(from io.ReadCloser) {
	defer close(p.done)
	defer from.Close()
	in := bufio.NewReader(from)
	for {
		text, err := in.ReadBytes(0)
		if err != nil {
			return
		}
		var m message
		if json.Unmarshal(text[:len(text)-1], &m) != nil {
			continue
		}
		p.mu.Lock()
		switch answer, ok := p.calls[m.ID]; {
		case ok:
			delete(p.calls, m.ID)
			answer <- m
		case m.Method == "Runtime.exceptionThrown", m.Method == "Log.entryAdded":
			p.problems = append(p.problems, string(text[:len(text)-1]))
		}
		p.mu.Unlock()
	}
}

// Problems returns the exceptions and the browser's complaints since the last call, such as violations of a policy,
// except those that contain one of these texts.
func (p *Page) Problems(except ...string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := p.problems
	p.problems = nil
	return slices.DeleteFunc(all, func(problem string) bool {
		return slices.ContainsFunc(except, func(text string) bool { return strings.Contains(problem, text) })
	})
}

// Eval evaluates an expression in the page, and waits if its value is a promise. v may be nil.
func (p *Page) Eval(ctx context.Context, expression string, v any) error {
	var answer struct {
		Result struct {
			Value json.RawMessage `json:"value"`
		} `json:"result"`
		Exception json.RawMessage `json:"exceptionDetails"`
	}
	err := p.Call(ctx, "Runtime.evaluate", map[string]any{
		"expression": expression, "awaitPromise": true, "returnByValue": true,
	}, &answer)
	switch {
	case err != nil:
		return err
	case answer.Exception != nil:
		return fmt.Errorf("%s: %s", expression, answer.Exception)
	case v == nil:
		return nil
	}
	return json.Unmarshal(answer.Result.Value, v)
}

// Look sets the width of the page in CSS pixels and the colour scheme, "light" or "dark".
func (p *Page) Look(ctx context.Context, width int, scheme string) error {
	return errors.Join(
		p.Call(ctx, "Emulation.setDeviceMetricsOverride", map[string]any{
			"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600,
		}, nil),
		p.Call(ctx, "Emulation.setEmulatedMedia", map[string]any{
			"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}},
		}, nil),
	)
}

// Picture returns a PNG of the page from its top, at most height CSS pixels high.
func (p *Page) Picture(ctx context.Context, height int) ([]byte, error) {
	var size struct {
		Content struct{ Width, Height float64 } `json:"cssContentSize"`
	}
	if err := p.Call(ctx, "Page.getLayoutMetrics", nil, &size); err != nil {
		return nil, err
	}
	var picture struct {
		Data []byte `json:"data"`
	}
	clip := map[string]any{
		"x": 0, "y": 0, "width": size.Content.Width, "height": min(size.Content.Height, float64(height)), "scale": 1,
	}
	params := map[string]any{"captureBeyondViewport": true, "clip": clip}
	err := p.Call(ctx, "Page.captureScreenshot", params, &picture)
	return picture.Data, err
}

// Close ends the browser, with all of its processes.
func (p *Page) Close() error {
	err := p.to.Close()
	if killed := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL); killed != nil && killed != syscall.ESRCH {
		err = errors.Join(err, killed)
	}
	p.cmd.Wait()
	return err
}
