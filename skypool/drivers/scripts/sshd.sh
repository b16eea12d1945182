# Runs sshd in a container on port $port, with the host key in $private and $public. The public key $client may log in
# as root. If sshd is not installed, it is installed first.
# shellcheck shell=sh disable=SC2154
umask 077
mkdir -p ~root/.ssh /etc/ssh
grep -qsxF "$client" ~root/.ssh/authorized_keys || printf "%s\n" "$client" >> ~root/.ssh/authorized_keys
printf "%s\n" "$private" > /etc/ssh/ssh_host_ed25519_key
printf "%s\n" "$public" > /etc/ssh/ssh_host_ed25519_key.pub
umask 022
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
until program=$(command -v sshd); do
    if command -v apt-get > /dev/null; then
        apt-get -q update
        RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install openssh-server
    elif command -v apk > /dev/null; then
        apk add openssh-server
    elif command -v dnf > /dev/null; then
        dnf -q -y install openssh-server
    fi
    command -v sshd > /dev/null || sleep 5
done
while :; do
    mkdir -p /run/sshd
    "$program" -D -e -p "$port" -o HostKey=/etc/ssh/ssh_host_ed25519_key -o PermitRootLogin=prohibit-password \
        -o PasswordAuthentication=no -o ClientAliveInterval=15 -o ClientAliveCountMax=3
    sleep 1
done
