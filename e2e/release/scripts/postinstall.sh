#!/bin/sh
# After an installation or an upgrade: "configure" of dpkg, or a number from rpm. The agent that runs is replaced by the
# new one. That ends no connection, since the kernel forwards meanwhile and BGP peers keep the routes. A failure leaves
# the old agent running, and does not fail the upgrade.
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload
if [ -d /run/systemd/system ] && systemctl -q is-active steelyard.service; then
	systemctl restart steelyard-watch.service
fi
if /usr/bin/steelyard status >/dev/null 2>&1; then
	/usr/bin/steelyard restart || echo "steelyard: the agent of the earlier version still runs; see above" >&2
fi
