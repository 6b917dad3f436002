#!/bin/sh
# After the removal. dpkg removes the configuration and the state of the agent with "purge" only; rpm knows no purge.
set -e
case "$1" in remove | purge | 0) ;; *) exit 0 ;; esac
[ ! -d /run/systemd/system ] || systemctl daemon-reload
rm -rf /run/steelyard
[ "$1" = remove ] || rm -rf /var/lib/steelyard
[ "$1" != purge ] || rm -rf /etc/steelyard
