# told: what the step printed, without what led to no uv and may have led to no failure, in $B/told
told() {
    gone='uv cannot be had; going on with pip'
    if grep -qxF "$gone" "$B/log"; then sed "1,/^$gone\$/d" "$B/log"; else cat "$B/log"; fi > "$B/told"
}

# explain: what to do about a failure of a known cause, by what the step printed; the first that fits
explain() {
    told
    # shellcheck disable=SC2016
    while IFS='~' read -r pattern words; do
        [ -n "$pattern" ] || continue
        said=$(grep -oiE "$pattern" "$B/told" | tail -n 1 | sed 's/[&~\\]/ /g')
        [ -n "$said" ] || continue
        printf '%s\n' "$words" | sed "s~%~$said~"
        return
    done <<'KNOWN'
no space left on device|disk quota exceeded~the disk is full: ask for a larger disk, or install less
(error sending request|could not resolve|could not connect|temporary failure|failed to (lookup|establish)|network is unreachable|unable to connect).*~this machine does not reach what it needs: %; let this machine connect to the internet, or name a mirror in its pip.conf or apt sources
unable to locate package [^ ]+~%: no such package in this machine's lists; look for its name on packages.debian.org or packages.ubuntu.com
version '[^']+' for '[^']+' was not found~%: the machine's lists may have another version: leave the version out, or see `apt-cache madison`
[^ ]+ was not found in the package registry~%: no such package on the index: check its spelling, or name its index in pip_indexes
no matching distribution found for .+~%: check its spelling and version, and that it has a wheel for this Python
there is no version of [^ ]+~%: see which versions its index has
no wheels with a matching|no matching (python|platform)~no wheel fits this Python or machine: another version of the package may have one
status client error \((401|403)[^)]*\)|lack of valid authentication~the index requires a login: %; give its user and password by secrets=["UV_INDEX_<NAME>_USERNAME", "UV_INDEX_<NAME>_PASSWORD"]
(error: command|unable to execute|no such file or directory:) '([^']*[/-])?(gcc|g\+\+|cc|c\+\+|clang|cmake|ninja|make)'.*|fatal error: python\.h.*|linker .cc. not found|(^|[ /])(gcc|g\+\+|cc|c\+\+|clang|cmake|ninja|make): (command )?not found|unknown compiler\(s\).*~a package has to be built on the machine, and the tools for this are missing: add apt=["build-essential", "cmake", "python3-dev"], or ask for a version that has a wheel
doesn.t declare it as a build dependency|modulenotfounderror: no module named .(torch|numpy|setuptools|packaging|wheel|cython|pybind11).~a package is built where the packages that it needs are not installed: leave it out of pip=, and build it when they are there, with pip=["torch", "setuptools", "wheel", "packaging", "ninja"] and run=["pip install --no-build-isolation NAME"]
git executable not found|cannot find command .git.|git.*: not found~git is needed to install a package, and is missing: add apt=["git"]
no solution found when resolving dependencies|resolutionimpossible~these requirements contradict each other, as told above: loosen one of them
certificate verify failed|invalid peer certificate|unknownissuer~a certificate is not trusted here: set SSL_CERT_FILE on the machine, or cert in its pip.conf
externally-managed-environment~pip must not change the system's Python: list packages in pip= instead, which gets an environment of its own
KNOWN
}
