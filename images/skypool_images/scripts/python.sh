# Which Python runs the agent, and where uv is.

# fits MINOR PYTHON: print its path if it is a whole CPython of this minor version
fits() {
    [ -n "$2" ] && [ -x "$2" ] && "$2" -I -S -c '
import sys, ctypes, multiprocessing, select, socket, ssl, zlib
if "%d.%d" % sys.version_info[:2] != sys.argv[1] or sys.implementation.name != "cpython":
    sys.exit(1)
print(sys.executable)' "$1" 2> /dev/null
}

# find_python MINOR: print the first that fits, of those that a recipe or the caller chose and those in usual places
find_python() {
    for each in "${SKYPOOL_VENV:-}/bin/python" "${SKYPOOL_PRESET:-}" \
        "$(command -v "python$1")" "/usr/bin/python$1" "/usr/local/bin/python$1" "$(command -v python3)" \
        "$SKYPOOL_HOME/python/cpython-$1."*/bin/"python$1" "$HOME/.local/share/uv/python/cpython-$1."*/bin/"python$1" \
        "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1."*/bin/"python$1" "$HOME/.local/bin/python$1" \
        "${CONDA_PREFIX:-/opt/conda}/bin/python$1" /opt/conda/bin/python"$1" "$HOME/miniconda3/bin/python$1" \
        "$HOME/anaconda3/bin/python$1" "/opt/python/bin/python$1" "/opt/python$1/bin/python$1"; do
        fits "$1" "$each" && return
    done
    return 1
}

# find_uv: print where uv is
find_uv() {
    for each in "$(command -v uv)" "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv" "$SKYPOOL_HOME/bin/uv" "$SKYPOOL_HOME/uv/bin/uv"; do
        [ -z "$each" ] || ! "$each" --version > /dev/null 2>&1 || { echo "$each"; return; }
    done
    return 1
}

# uv_by_pip PYTHON...: install uv with the pip of the first that has one, or can make an environment with one
uv_by_pip() {
    rm -rf "$SKYPOOL_HOME/uv"
    for each in "$@"; do
        if have "$each" && "$each" -m pip --version > /dev/null 2>&1; then
            "$each" -m pip install -q --target "$SKYPOOL_HOME/uv" uv
            return
        fi
    done
    for each in "$@"; do
        if have "$each" && "$each" -c 'import venv, ensurepip' 2> /dev/null && "$each" -m venv "$SKYPOOL_HOME/uv"; then
            "$SKYPOOL_HOME/uv/bin/python" -m pip install -q uv
            return
        fi
    done
    return 1
}

# uv_by_installer: install uv with its own installer
uv_by_installer() {
    if have curl; then
        curl -LsSf --retry 2 --connect-timeout 20 https://astral.sh/uv/install.sh -o "$B/install-uv.sh" || return 1
    elif have wget; then
        wget -q -T 20 -t 3 -O "$B/install-uv.sh" https://astral.sh/uv/install.sh || return 1
    else
        return 1
    fi
    UV_INSTALL_DIR="$SKYPOOL_HOME/bin" UV_NO_MODIFY_PATH=1 INSTALLER_NO_MODIFY_PATH=1 sh "$B/install-uv.sh"
}

# own_sources: whether this machine is told of a proxy or of package servers of its own
own_sources() {
    env | grep -qiE '^((all|http|https)_proxy|PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|PROXY|CONFIG_FILE)|UV_[A-Z_]*(INDEX|LINKS|MIRROR|CONFIG_FILE)[A-Z_]*)=.' && return
    for each in /etc/pip.conf "${XDG_CONFIG_DIRS:-/etc/xdg}/pip/pip.conf" "$HOME/.pip/pip.conf" \
        "${XDG_CONFIG_HOME:-$HOME/.config}/pip/pip.conf" /etc/uv/uv.toml "${XDG_CONFIG_HOME:-$HOME/.config}/uv/uv.toml"; do
        ! grep -qsE '^ *(url|index-url|extra-index-url|find-links|proxy|python-install-mirror) *=' "$each" || return 0
    done
    have apt-config && apt-config dump 2> /dev/null | grep -qE '^Acquire::https?::Proxy "?[^";]'
}

# named: whether a name server knows where uv comes from; true where nothing here can ask one
named() {
    have getent || return 0
    for pause in 2 0; do
        for each in pypi.org astral.sh; do
            timeout 5 getent hosts "$each" > /dev/null && return
        done
        sleep "$pause"
    done
    return 1
}

# cut_off: whether nothing can come from the network, and why. No other attempt changes that, so it is told at once.
cut_off() {
    ! own_sources || return 1
    if ! { awk '$2 == "00000000" && $8 == "00000000" && $1 != "lo" { n++ } END { exit !n }' /proc/net/route ||
        awk '$1 ~ /^0+$/ && $2 == "00" && $10 != "lo" { n++ } END { exit !n }' /proc/net/ipv6_route; } 2> /dev/null; then
        echo "this machine has no default route, no proxy and no package server of its own"
    elif ! named; then
        echo "this machine finds the address of neither pypi.org nor astral.sh, and has no proxy and no package server of its own"
    else
        return 1
    fi
}

# have_uv PYTHON: set UV, from what is there or else from the network
have_uv() {
    UV=$(find_uv) && return
    echo "there is no uv on this machine yet"
    if cut_off; then
        advise "give this machine a way to the internet, a proxy (https_proxy in /etc/environment) or a package server (index-url in /etc/pip.conf)"
        return 1
    fi
    echo "install uv" > "$B/command"
    if ! uv_by_pip "$1" python3 /usr/bin/python3 python && ! uv_by_installer; then
        [ "$(id -u)" = 0 ] || sudo -n true 2> /dev/null || return 1
        [ "${SKYPOOL_CHANGES:-yes}" != no ] && have apt-get || return 1
        (apt_install python3-venv python3-pip) && uv_by_pip /usr/bin/python3 || return 1
    fi
    UV=$(find_uv)
}

# uv_settings PYTHON: uv takes what this machine says to pip: indexes, certificates, proxy
uv_settings() {
    export UV_NO_PROGRESS=1 UV_PYTHON_INSTALL_DIR="${UV_PYTHON_INSTALL_DIR:-$SKYPOOL_HOME/python}" UV_PYTHON_INSTALL_BIN=0
    case $("$UV" --help 2> /dev/null) in
        *--system-certs*) export UV_SYSTEM_CERTS=true ;;
        *) export UV_NATIVE_TLS=true ;;
    esac
    have "$1" || return 0
    "$1" -I -S - > "$B/uv.env" <<'PYTHON' || : > "$B/uv.env"
import configparser, os, shlex
home, said = os.path.expanduser("~"), {}
config = os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
files = [os.path.join(each, "pip/pip.conf") for each in (os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
files += ["/etc/pip.conf", os.path.join(home, ".pip/pip.conf"), os.path.join(config, "pip/pip.conf")]
own = os.environ.get("PIP_CONFIG_FILE")
parser = configparser.RawConfigParser()
parser.read([] if own == os.devnull else files + [own] if own else files)
for section in ("global", "install"):
    if parser.has_section(section):
        said.update((key.replace("_", "-"), value) for key, value in parser.items(section))
said.update((k[4:].lower().replace("_", "-"), v) for k, v in os.environ.items() if k.startswith("PIP_") and v)
links = [each[7:] if each.startswith("file://") else each for each in said.get("find-links", "").split()]
timeout = said.get("timeout", said.get("default-timeout", ""))
more = " ".join(said.get("extra-index-url", "").split())
for name, value in (
    ("UV_DEFAULT_INDEX", said.get("index-url", "")),
    ("UV_INDEX", more),
    ("UV_INDEX_STRATEGY", "unsafe-best-match" if more else ""),  # as pip does: the best of all indexes
    ("UV_FIND_LINKS", ",".join(each for each in links if "://" in each or os.path.exists(each))),
    ("UV_INSECURE_HOST", " ".join(said.get("trusted-host", "").split())),
    ("UV_HTTP_TIMEOUT", timeout if timeout.isdigit() else ""),
    ("SSL_CERT_FILE", said.get("cert", "")),
    ("ALL_PROXY", said.get("proxy", "")),
):
    if value and not os.environ.get(name):
        print("export %s=%s" % (name, shlex.quote(value)))
PYTHON
    # shellcheck disable=SC1091
    . "$B/uv.env"
}

# choose_python MINOR: keep the interpreter, found here or installed by uv
choose_python() {
    if ! found=$(find_python "$1"); then
        [ -z "${SKYPOOL_PRESET:-}" ] || echo "$SKYPOOL_PRESET is no Python $1; taking another"
        have_uv python3 || {
            advise "install Python $1 or uv on this machine (apt-get install python$1, or https://docs.astral.sh/uv), or use a client with a Python that it has"
            fail "there is no Python $1 here, and uv, which would install it, cannot be had"
        }
        uv_settings python3
        run "$UV" python install "$1"
        found=$(find_python "$1") || fail "uv has installed Python $1, but it does not start"
    fi
    echo "Python $1 is $found"
    keep SKYPOOL_PYTHON "$found"
    keep SKYPOOL_CHOSEN "${SKYPOOL_PRESET:-}"
}
