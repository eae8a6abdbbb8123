# SPDX-License-Identifier: Apache-2.0
"""Shell completion of the entry points: a script for bash or zsh, made from the options.

A program is started as `python -m MODULE` or `torchrun ... -m MODULE`, so the script completes the
words behind a module's name. Scripts of several programs may be sourced into one shell.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.training.options.schema import Option

#: What each script shares: finds the module among the words and asks its function for candidates.
_ENGINE = """\
_megatron_complete() {
  local module="" command="" found="" i=1
  COMPREPLY=()
  while [ "$i" -lt "$COMP_CWORD" ]; do
    case "${COMP_WORDS[$i]}" in
      megatron.*) module="${COMP_WORDS[$i]}"; command="${COMP_WORDS[$((i + 1))]}" ;;
    esac
    i=$((i + 1))
  done
  found="_complete_${module//./_}"
  typeset -f "${found}_$command" >/dev/null && found="${found}_$command"
  typeset -f "$found" >/dev/null || return 0
  COMPREPLY=( $(compgen -W "$("$found" "${COMP_WORDS[$((COMP_CWORD - 1))]}")" \\
    -- "${COMP_WORDS[$COMP_CWORD]}") )
}
complete -o default -F _megatron_complete python python3 torchrun
"""

_ZSH = """\
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def completion_script(known: Sequence[Option], prog: str, shell: str) -> str:
    """Return the script that completes a program's flags and the values it can list.

    Args:
        known: the options.
        prog: how the program is called, `python -m MODULE` or `python -m MODULE COMMAND`.
        shell: bash or zsh.
    """
    words = prog.split()
    module = " ".join(words[words.index("-m") + 1 :] if "-m" in words else words[-1:])
    spellings = [f"--{o.name}" for o in known] + [f"--no-{o.name}" for o in known if o.kind is bool]
    cases = [f"    --{o.name}) echo '{' '.join(o.choices)}' ;;" for o in known if o.choices]
    # Behind any other flag with a value the shell offers files.
    others = "|".join(f"--{o.name}" for o in known if not o.choices and o.kind is not bool)
    function = "\n".join(
        [
            f"_complete_{module.replace('.', '_').replace(' ', '_')}() {{",
            '  case "$1" in',
            *cases,
            *([f"    {others}) ;;"] if others else []),
            f"    *) echo '{' '.join(['--help', *spellings])}' ;;",
            "  esac",
            "}",
        ]
    )
    start = f"# Completion of {module} for {shell}; source it, from your shell's start-up file.\n"
    return start + (_ZSH if shell == "zsh" else "") + function + "\n" + _ENGINE
