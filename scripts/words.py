"""Finds our old dialect in docstrings, comments and names; plain English is asked for in CONTRIBUTING.md.

    python scripts/words.py [--since REF]    lines that are new since REF (default: since main)
    python scripts/words.py --all            every line
    python scripts/words.py --ratchet        fail if a file has more uses than scripts/words.toml allows
    python scripts/words.py --update         lower what is allowed to what there is

Four forms count: a process that speaks, in texts and in names (a worker *sends*, *receives*, *reports* or
*stores*); the pronoun for any person who does something; a docstring that opens with "What" or "Have"; and a
genitive at the front ("Of a job that ended, the checkpoint"). A line that needs one of them nonetheless ends
with `# words: ok`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "scripts" / "words.toml"
WHERE = ("src", "scripts")
OK = "# words: ok"
_SPEAK = {
    "say": "says said saying",
    "tell": "tells told telling",
    "hear": "hears heard hearing",
    "ask": "asks asked asking",
    "know": "knows knew knowing",
}
SPEAK = {form for verb, forms in _SPEAK.items() for form in (verb, *forms.split())}
_VERB = f"(?:{'|'.join(sorted(SPEAK))})"
_PROCESS = (
    "(?:worker|process|coordinator|launcher|zygote|supervisor|nursery|engine|plane|server|member|newcomer|joiner|"
    "survivor|leaver|peer|job|leader|node|scheduler|policy|policies|site|scout|holder|swell|client|listener|rank|"
    "replica|agent|board|simulator|loader|script|tracker)(?:s|es)?"
)
_BETWEEN = (
    "(?:that|which|who|itself|does|do|did|has|have|had|is|are|was|were|can|could|may|might|must|will|would|should|"
    "not|never|also|then|only|already|ever|all|both|first|once|no|longer|still|now|be|been|it|they)"
)
_ARTICLE = "(?:the|a|an|its|their|all|each|every|other|this|that|both|any|another|one|these|those)"
FORMS = {
    "a process that speaks": re.compile(
        rf"\b{_PROCESS}(?:\s+{_BETWEEN})*\s+{_VERB}\b"
        rf"|\b(?:tell|tells|told|telling|ask|asks|asked|asking)\s+(?:{_ARTICLE}\s+)*(?:\w+\s+)?{_PROCESS}\b",
        re.I,
    ),
    '"whoever"': re.compile(r"\bwhoever\b", re.I),
    '"What" or "Have" at the front': re.compile(r"\A\s*(?:What|Have)\s"),
    "a genitive at the front": re.compile(r"\A\s*Of\s|[.:]\s+Of (?:a|an|the|each|every)\s"),
}
"""Forms in the text of a docstring or of a comment."""
_DEFINED = re.compile(
    r"^\s*(?:async\s+)?(?:def|class)\s+(\w+)|^\s*(?:self\.)?(\w+)\s*(?::[^=]+)?=[^=]|^\s*(\w+):\s[^=]+,?$"
)
_PARAMETER = re.compile(r"(\w+):\s")
_PART = re.compile(r"[A-Z]?[a-z]+")
_COMMENT = re.compile(r"(?:^|\s)#:?\s(.*)$")


@dataclass(frozen=True, slots=True)
class Find:
    """One use of a form."""

    file: str
    line: int
    form: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.form}: {self.text}"


def finds(file: str, text: str) -> Iterator[Find]:
    """All uses of the forms in a Python file."""
    lines = text.splitlines()
    for number, block, in_docstring in _blocks(lines):
        for form, pattern in FORMS.items():
            if "front" in form and not in_docstring:
                continue
            for match in pattern.finditer(block):
                line = number + block.count(
                    "\n", 0, match.start() + len(match[0]) - len(match[0].lstrip(". :\n"))
                )
                if OK not in lines[line - 1]:
                    yield Find(file, line, form, " ".join(match[0].split()))
    for number, code in _code(lines):
        names = [name for match in _DEFINED.finditer(code) for name in match.groups() if name]
        if "def " in code:
            names += _PARAMETER.findall(code.partition("(")[2])
        for name in dict.fromkeys(names):
            if SPEAK & {part.lower() for part in _PART.findall(name)} and OK not in lines[number - 1]:
                yield Find(file, number, "a name that speaks", name)


def _blocks(lines: list[str]) -> Iterator[tuple[int, str, bool]]:
    """First line, text, and whether it is a docstring, of every docstring and every run of comments."""
    comment, began = list[str](), 0
    for number, kind, text in _parts(lines):
        found = _COMMENT.search(text) if kind == "code" else None
        if found is not None and found[1] and text[: found.start()].count('"') % 2 == 0:
            if comment and began + len(comment) != number:
                yield began, "\n".join(comment), False
                comment = []
            began = began if comment else number
            comment.append(found[1])
        if kind == "docstring":
            yield number, text, True
    if comment:
        yield began, "\n".join(comment), False


def _code(lines: list[str]) -> Iterator[tuple[int, str]]:
    return ((number, text) for number, kind, text in _parts(lines) if kind == "code")


def _parts(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    """Line number, "code" or "docstring", and text: each line of code, each docstring as one; no other
    strings of several lines."""
    inside, docstring, began, text = False, False, 0, list[str]()
    for number, line in enumerate(lines, 1):
        quotes = line.count('"""')
        if not inside:
            docstring = line.lstrip(" rf").startswith('"""')
            if docstring:
                began, text = number, []
            else:
                yield number, "code", line
        if docstring and (inside or quotes):
            text.append(line.replace('"""', "").strip().removeprefix("r"))
        inside ^= quotes % 2 == 1
        if docstring and not inside and quotes:
            yield began, "docstring", "\n".join(text)
            docstring = False


def everything() -> list[Find]:
    """All uses in all files."""
    files = sorted(path for where in WHERE for path in (ROOT / where).rglob("*.py"))
    return [find for path in files for find in finds(str(path.relative_to(ROOT)), path.read_text())]


def new(since: str | None) -> list[Find]:
    """The uses in lines that are new since a commit."""
    base = since or _base()
    added, file = set[tuple[str, int]](), ""
    for line in _git("diff", "--unified=0", "--no-color", "--find-renames", base, "--", *WHERE).splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ").removeprefix("b/")
        elif line.startswith("@@"):
            begin, _, count = line.split("+")[1].split(" ")[0].partition(",")
            added |= {(file, int(begin) + n) for n in range(int(count or 1))}
    for untracked in _git("ls-files", "--others", "--exclude-standard", "--", *WHERE).splitlines():
        count = len((ROOT / untracked).read_text(errors="replace").splitlines())
        added |= {(untracked, n + 1) for n in range(count)}
    files = sorted({file for file, _ in added if file.endswith(".py")})
    all_ = (find for file in files for find in finds(file, (ROOT / file).read_text()))
    return [find for find in all_ if (find.file, find.line) in added]


def _base() -> str:
    for name in ("origin/main", "main"):
        base = _git("merge-base", name, "HEAD", check=False).strip()
        if base and base != _git("rev-parse", "HEAD").strip():
            return base
    return "HEAD~1"


def _git(*words: str, check: bool = True) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=check).stdout


def allowed() -> dict[str, int]:
    """How many uses each file may have; none where it is not listed."""
    return dict(tomllib.loads(ALLOWED.read_text())["uses"]) if ALLOWED.exists() else {}


def over(found: list[Find], limits: dict[str, int]) -> list[str]:
    """The uses in files that have more than allowed: all of them, because any may be the new one."""
    counts = Counter(find.file for find in found)
    worse = {file: count for file, count in counts.items() if count > limits.get(file, 0)}
    out = [str(find) for find in found if find.file in worse]
    return out + [f"{file}: {count} uses, {limits.get(file, 0)} are allowed" for file, count in worse.items()]


def update(found: list[Find]) -> str | None:
    """Write how many uses each file has now; an error if that are more than before.

    Lines may move from a file to another one, so only the sum over all files must not grow.
    """
    counts, before = Counter(find.file for find in found), allowed()
    if before and counts.total() > sum(before.values()):
        return f"{counts.total()} uses, {sum(before.values())} are allowed: rewrite the new ones first"
    rows = "".join(f'"{file}" = {count}\n' for file, count in sorted(counts.items()))
    ALLOWED.write_text(
        "# How many uses of the old dialect each file still has (scripts/words.py). Numbers only go down:\n"
        f"# rewrite some, then run `scripts/words.py --update`.\n\n[uses]\n{rows}"
    )
    return None


def main() -> int:
    """Print what was asked for; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--since", metavar="REF", help="look at the lines that are new since this commit")
    what.add_argument("--all", action="store_true", help="look at every line")
    what.add_argument("--ratchet", action="store_true", help="fail if a file has more than it is allowed")
    what.add_argument("--update", action="store_true", help="allow each file only what it has now")
    args = parser.parse_args()
    if args.update:
        error = update(everything())
        print(error or f"{sum(allowed().values())} uses are allowed")
        return int(error is not None)
    found = everything() if args.all or args.ratchet else new(args.since)
    lines = over(found, allowed()) if args.ratchet else [str(find) for find in found]
    print(*lines, sep="\n", end="\n" if lines else "")
    if args.all:
        print(f"{len(found)} uses in {len({find.file for find in found})} files")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
