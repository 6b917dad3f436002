#!/bin/sh
# Runs before a removal, not before an upgrade. The agent withdraws its routes and stops; then everything is removed
# from the kernel.
# It is an error when an agent runs that systemd does not know, and the package stays.
set -e
case "$1" in remove | 0) ;; *) exit 0 ;; esac
[ ! -d /run/systemd/system ] || systemctl disable --now steelyard.service
[ ! -d /run/systemd/system ] || systemctl stop steelyard-watch.service
/usr/bin/steelyard cleanup
