# Makes sshd close a connection within a minute after the client's network was cut.
# shellcheck shell=sh
alive="ClientAliveInterval 15
ClientAliveCountMax 3"
mkdir -p /etc/ssh/sshd_config.d
printf "%s\n" "$alive" > /etc/ssh/sshd_config.d/00-skypool.conf
config=/etc/ssh/sshd_config
if [ -e $config ] && ! grep -qE "^ *Include +/etc/ssh/sshd_config.d/|^ClientAliveInterval 15$" $config; then
    { printf "%s\n" "$alive" && cat $config; } > $config.skypool && cat $config.skypool > $config
    rm -f $config.skypool
fi
