# Environments: each in a folder of its own, whole or not there.

# begin_env MINOR: set up $E, made anew; what is wanted stands in $R
begin_env() {
    rm -rf "$E"
    mkdir -p "$SKYPOOL_HOME/envs"
    unset VIRTUAL_ENV PYTHONPATH PYTHONHOME CONDA_PREFIX
    cd "$R" || return
    if [ -n "${SKYPOOL_VENV:-}" ] && ! fits "$1" "$SKYPOOL_VENV/bin/python" > /dev/null; then
        echo "$SKYPOOL_VENV is not built upon: its Python is no $1"
        SKYPOOL_VENV=
    fi
    [ -n "${SKYPOOL_VENV:-}" ] || have_uv "$SKYPOOL_PYTHON" || {
        echo "uv cannot be had; going on with pip"
        UV=
    }
}

# end_env: it is whole; commands that ran in one that was not are to run again
end_env() {
    : > "$E/.whole"
    rm -f "$SKYPOOL_HOME"/stamps/run-*
    keep SKYPOOL_PYTHON "$E/bin/python"
}

# fill_env: install what stands in $R into $E, with uv where it can be had
fill_env() {
    if [ -n "${SKYPOOL_VENV:-}" ]; then
        on_top_of "$SKYPOOL_VENV"
        with_pip
    elif [ -z "$UV" ]; then
        run "$SKYPOOL_PYTHON" -m venv "$E"
        with_pip
    else
        uv_settings "$SKYPOOL_PYTHON"
        run "$UV" venv -q --python "$SKYPOOL_PYTHON" "$E"
        with_uv
    fi
}

# on_top_of VENV: an environment that sees all that is installed in another one
on_top_of() {
    run "$1/bin/python" -m venv --without-pip --system-site-packages "$E"
    packages='import sysconfig; print(sysconfig.get_path("purelib"))'
    below=$("$1/bin/python" -c "$packages" | tail -n 1) # a sitecustomize may print as well
    echo "$below" > "$("$E/bin/python" -c "$packages" | tail -n 1)/_skypool_below.pth"
}

# torch_for_uv INDEX: PyTorch and its parts come from this index, for which uv has a word of its own
torch_for_uv() {
    case $("$UV" pip install --help 2> /dev/null) in
        *"${1##*/},"* | *"${1##*/}]"*) export UV_TORCH_BACKEND="${1##*/}" ;;
        *) export UV_INDEX="${UV_INDEX:+$UV_INDEX }$1" UV_INDEX_STRATEGY=unsafe-best-match ;;
    esac
}

# sent_project PROGRAM…: install the packages of the project that was sent, from its files
sent_project() {
    [ -s sent.txt ] || return 0
    told=$(cat sent.txt)
    (
        export UV_PROJECT_ENVIRONMENT="$E" UV_PYTHON="$E/bin/python"
        cd "$SKYPOOL_WORK" || exit
        # shellcheck disable=SC2086  # each word of $told is an argument
        run "$@" $told
    )
    echo "$SKYPOOL_WORK" > "$E/.sent_to"
}

with_uv() {
    if [ -s sent.txt ]; then
        sent_project "$UV"
    elif [ -e project/uv.lock ]; then
        (cd project && UV_PROJECT_ENVIRONMENT=$E run "$UV" sync --frozen --no-dev --no-install-project --no-install-workspace --inexact --python "$E/bin/python")
    elif [ -e project/pyproject.toml ]; then
        set -- -r pyproject.toml
        [ ! -e scoped/pyproject.toml ] || set -- "$@" -r ../scoped/pyproject.toml # what has an index of its own
        (cd project && run "$UV" pip install --python "$E/bin/python" "$@")
    fi
    set -- -r pyproject.toml
    [ ! -s sent_packages.txt ] || set -- "$@" -r sent_packages.txt
    [ ! -s torch.txt ] || torch_for_uv "$(cat torch.txt)"
    [ ! -s requirements.txt ] || set -- "$@" -r requirements.txt
    [ ! -s constraints.txt ] || set -- "$@" -c constraints.txt
    run "$UV" pip install --python "$E/bin/python" "$@"
    # for the user's own commands: what they call pip is to be this environment's
    [ -e "$E/bin/pip" ] || UV_HTTP_RETRIES=0 "$UV" pip install -q --python "$E/bin/python" pip > /dev/null 2>&1 ||
        echo "this index has no pip, and so has the environment: commands can use $UV pip"
}

# with_pip: as uv does it; what has an index of its own comes first, and stays as it is
with_pip() {
    if [ -e project/uv.lock ]; then
        advise "only uv can install what uv.lock says: make uv available on that base, or leave lock out and list what is needed in pip="
        fail "no uv for uv.lock"
    fi
    if [ -s only_uv.txt ]; then
        advise "only uv can install what $(cat only_uv.txt) of the project says: make uv available on that base"
        fail "no uv for $(cat only_uv.txt)"
    fi
    sent_project "$E/bin/python" -m
    set --
    for each in named.txt sent_packages.txt requirements.txt; do
        [ ! -s "$each" ] || set -- "$@" -r "$each"
    done
    [ $# -gt 0 ] || return 0
    [ ! -s pip.txt ] || set -- "$@" -r pip.txt
    [ ! -s constraints.txt ] || set -- "$@" -c constraints.txt
    if [ -s sources.txt ]; then
        while read -r url each; do
            run "$E/bin/python" -m pip install --no-deps --index-url "$url" "$each"
        done < sources.txt
        "$E/bin/python" -m pip freeze --local > pinned.txt
        set -- "$@" -c pinned.txt
    fi
    run "$E/bin/python" -m pip install "$@"
}
