# Gives the running sshd the host key in $private and $public, and lets the public key $client log in as root. If
# $client is empty, nobody gets a login.
# shellcheck shell=sh disable=SC2154
umask 077
mkdir -p ~root/.ssh /etc/ssh
[ -z "$client" ] || grep -qsxF "$client" ~root/.ssh/authorized_keys || printf "%s\n" "$client" >> ~root/.ssh/authorized_keys
printf "%s\n" "$private" > /etc/ssh/ssh_host_ed25519_key.skypool
mv -f /etc/ssh/ssh_host_ed25519_key.skypool /etc/ssh/ssh_host_ed25519_key
printf "%s\n" "$public" > /etc/ssh/ssh_host_ed25519_key.pub
chmod 644 /etc/ssh/ssh_host_ed25519_key.pub
unset private
umask 022
if [ -d /run/systemd/system ]; then
    systemctl --no-block try-reload-or-restart ssh.service sshd.service
elif [ -s /run/sshd.pid ]; then
    kill -HUP "$(cat /run/sshd.pid)"
fi
