"""`why_secret`, `is_cache`: which files of a project never leave this computer unless the user names them."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from fnmatch import translate
from functools import lru_cache

_SECRET = (
    # variables and tokens
    ".env*", "*.env", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".pgpass", ".boto", ".htpasswd",
    ".*_history", ".secrets", ".secrets.*", ".dev.vars", ".yarnrc.yml", ".renviron", ".condarc", "secrets.toml",
    "secrets.yaml", "secrets.yml", "secrets.json", "secret.yaml", "secret.yml", "hf_token", ".hf_token",
    ".vault_pass*", "cookies.txt",
    # accounts of clouds
    ".aws", ".azure", ".gcloud", "gcloud", ".oci", ".kube", "kubeconfig", "kubeconfig.y*ml", ".docker",
    ".dockerconfigjson", "credentials.json", "application_default_credentials.json", "client_secret*.json",
    "*service-account*.json", "*service_account*.json", "*.tfstate", "*.tfstate.*", "*.tfvars", "aws_credentials",
    ".aws-credentials", ".aws_credentials",
    # accounts of other services
    ".config", ".runpod", ".vast_api_key", "vast_api_key", ".verda", ".kaggle", "kaggle.json", ".huggingface",
    "stored_tokens", ".modal.toml", ".databrickscfg", ".snowflake", ".s3cfg", "rclone.conf",
    ".rclone.conf", ".terraform.d", ".terraformrc", ".vault-token", ".lambda_cloud", ".cloudflared", ".fly", ".heroku",
    "rootkey.csv", "*accesskeys.csv", "credentials", "credentials.csv", "credentials.toml", "credentials.yaml",
    "credentials.yml", "*.tfvars.json", ".comet.config", "token.json", "token.pickle", "clouds.yaml", "auth.json",
    ".dockercfg", ".my.cnf", "pip.conf",
    # keys
    ".ssh", ".gnupg", "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", "*.pem", "*.key",
    "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx",
)  # fmt: skip
"""The names of files and folders with secrets, in lower case."""
_CACHES = (
    ".git", ".hg", ".svn", "__pycache__", "*.pyc", ".venv", ".tox", ".nox", ".mypy_cache", ".ruff_cache",
    ".pytest_cache", ".hypothesis", ".ipynb_checkpoints", "node_modules", ".ds_store", "*.egg-info",
)  # fmt: skip
"""The names of files and folders that tools make anew, in lower case."""


def _one_of(patterns: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))


_SECRET_NAME = _one_of(_SECRET)
_CACHE_NAME = _one_of(_CACHES)
_KEYS = {
    b"PRIVATE KEY": re.compile(rb"(?m)^[ \t]*-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----\s*$"),
    b"PuTTY-User-Key-File-": re.compile(rb"\A\s*PuTTY-User-Key-File-\d"),
    b"AGE-SECRET-KEY-1": re.compile(rb"(?m)^AGE-SECRET-KEY-1[A-Z0-9]{50}"),
}
"""What a private key looks like, each by a word that is in it: to look for a word takes a fiftieth of the time."""
_LOGINS = {
    b"client-key-data": re.compile(rb"(?m)^[ \t]*client-key-data:[ \t]*\S{40}"),
    b"aws_secret_access_key": re.compile(rb"(?m)^aws_secret_access_key[ \t]*=[ \t]*[A-Za-z0-9/+]{40}[ \t]*$"),
    b"hf_": re.compile(rb"\Ahf_[A-Za-z0-9]{30,}\s*\Z"),
    b'"type"': re.compile(rb'(?s)\A\{.*"type"\s*:\s*"(?:service_account|external_account|authorized_user)"'),
    b'"auths"': re.compile(rb'(?s)\A\{.*"auths"\s*:\s*\{\s*"'),
}
"""The same of the login of an account, in a text that begins with no space."""
_NAMES = 1000
"""The number of names that are known: those of folders come again with each file in them."""
READ = 65536
"""The number of bytes of a file that tell whether it is a key or the login of an account."""


@lru_cache(_NAMES)
def why_secret(name: str) -> str:
    """Return why a file or folder of this name holds secrets; "" if it does not."""
    lower = name.lower()
    return "it may hold secrets" if _SECRET_NAME.match(lower) else ""


def why_secret_inside(begin: bytes) -> str:
    """Return why a file is secret whose first `READ` bytes are these; "" if it is not."""
    for word, key in _KEYS.items():  # loops, as this is asked of each file of a project
        if word in begin and key.search(begin):
            return "it is a private key"
    for word, login in _LOGINS.items():
        if word in begin and login.search(begin.removeprefix(codecs.BOM_UTF8).lstrip()):
            return "it is the login of an account"
    return ""


@lru_cache(_NAMES)
def is_cache(name: str) -> bool:
    """Return True if a tool makes a file or folder of this name anew."""
    return _CACHE_NAME.match(name.lower()) is not None
