"""Teach a Megatron tree the value `moeblaze` in its source, or take it out again.

    python -m moeblaze_megatron.patch --check | --apply | --revert PATH

PATH is a Megatron-LM checkout, or the site-packages (or the megatron or megatron/core folder) of an
installed megatron-core. The patches are plain unified diffs, one for each release, in patches/.
"""

import argparse
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from moeblaze_megatron import command

RELEASE = re.compile(r"Megatron-Core (\d+\.\d+): (.*)")
HUNK = re.compile(r"@@ -(\d+)")


class Refused(ValueError):
    """A tree that cannot be changed: why, and what to do."""


@dataclass(frozen=True)
class Hunk:
    """A place to change: the lines there, with their surroundings, before and after."""

    path: str  # below megatron/core
    line: int
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Patch:
    """The change of one release of Megatron-Core."""

    file: Path
    release: str  # "0.19"
    about: str  # which versions it was made for
    hunks: tuple[Hunk, ...]


def patch_folder() -> Path:
    """Inside an installed package, or beside the package in a clone."""
    package = Path(__file__).parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def read_patch(file: Path) -> Patch:
    head, *lines = file.read_text().splitlines(keepends=True)
    release, about = RELEASE.match(head).groups()
    hunks, path = [], None
    for line in lines:
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/megatron/core/").strip()
        elif line.startswith("@@"):
            hunks.append((path, int(HUNK.match(line)[1]), [], []))
        elif not line.startswith("--- "):
            _, _, before, after = hunks[-1]
            before += [line[1:]] * (line[0] in " -")
            after += [line[1:]] * (line[0] in " +")
    return Patch(
        file,
        release,
        about,
        tuple(Hunk(p, n, "".join(b).encode(), "".join(a).encode()) for p, n, b, a in hunks),
    )


def patches() -> list[Patch]:
    """Those of patches/, oldest release first."""
    found = [read_patch(file) for file in patch_folder().glob("*.patch")]
    return sorted(found, key=lambda patch: minor(patch.release))


def minor(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))


def find_core(path: Path) -> Path:
    """The folder megatron/core that `path` holds or is; raises Refused."""
    for folder in (path / "megatron" / "core", path / "core", path):
        if (folder / "package_info.py").is_file():
            return folder
    raise Refused(
        f"no megatron/core in {path}: name a Megatron-LM checkout, or the site-packages that "
        "megatron-core is installed in"
    )


def version_of(core: Path) -> str:
    """ "0.19.1", from package_info.py, without importing it."""
    text = (core / "package_info.py").read_text()
    found = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.M))
    if len(found) < 3:
        raise Refused(f"{core / 'package_info.py'} names no version of Megatron-Core")
    return "{MAJOR}.{MINOR}.{PATCH}".format(**found)


def found_at(core: Path, hunk: Hunk) -> str | None:
    """Whether `hunk` is "before" or "after" its change in the tree; None if it is neither."""
    file = core / hunk.path
    text = file.read_bytes() if file.is_file() else b""
    counts = text.count(hunk.before), text.count(hunk.after)
    return {(1, 0): "before", (0, 1): "after"}.get(counts)


def states(core: Path, patch: Patch) -> list[str]:
    """ "before" or "after" its change, of each place; raises Refused if one is neither."""
    found = [found_at(core, hunk) for hunk in patch.hunks]
    if None not in found:
        return found
    others = [
        f"{core / hunk.path} near line {hunk.line}"
        for hunk, state in zip(patch.hunks, found, strict=True)
        if state is None
    ]
    raise Refused(
        f"this tree differs from Megatron-Core {patch.release} ({patch.about}) where it would be "
        f"changed: {'; '.join(others)}. {nearest(core)}"
    )


def nearest(core: Path) -> str:
    """A sentence on the release whose patch has most of its places in this tree.

    Of several that have equally many, the one whose number is closest.
    """
    own = version_of(core)

    def places_and_closeness(patch: Patch) -> tuple[int, ...]:
        places = sum(found_at(core, hunk) is not None for hunk in patch.hunks)
        closeness = (-abs(a - b) for a, b in zip(minor(own), minor(patch.release), strict=True))
        return places, *closeness

    patch = max(patches(), key=places_and_closeness)
    places, *_ = places_and_closeness(patch)
    return (
        f"The nearest known release is {patch.release}, {places} of whose {len(patch.hunks)} "
        f"places are here: make the change of {patch.file} by hand"
    )


def patch_for(core: Path) -> Patch:
    """The patch of this tree's release; raises Refused if there is none."""
    version, known = version_of(core), patches()
    for patch in known:
        if minor(patch.release) == minor(version):
            return patch
    raise Refused(
        f"there is no patch for Megatron-Core {version} in {core}, only for "
        f"{', '.join(patch.release for patch in known)}. {nearest(core)}"
    )


def change(core: Path, patch: Patch, revert: bool = False) -> list[str]:
    """Applies `patch` to the tree, or reverts it; returns the files that changed.

    A tree that is as asked for already stays as it is, and one that is so in part is finished.
    Reverting gives back the very bytes.

    Raises:
        Refused: the tree is not of this release, or a file cannot be written. Nothing is changed.
    """
    there = "after" if revert else "before"
    found = zip(patch.hunks, states(core, patch), strict=True)
    hunks = [hunk for hunk, state in found if state == there]
    contents = {hunk.path: (core / hunk.path).read_bytes() for hunk in hunks}
    if locked := [path for path in contents if not os.access(core / path, os.W_OK)]:
        raise Refused(f"no permission to write {', '.join(str(core / path) for path in locked)}")
    for hunk in hunks:
        old, new = (hunk.after, hunk.before) if revert else (hunk.before, hunk.after)
        contents[hunk.path] = contents[hunk.path].replace(old, new)
    for path, content in contents.items():
        (core / path).write_bytes(content)
    return list(contents)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moeblaze_megatron.patch",
        description="Teach a Megatron tree --moe-token-dispatcher-type moeblaze in its source.",
        epilog="The launcher, python -m moeblaze_megatron, needs no patch.",
    )
    action = parser.add_mutually_exclusive_group(required=True)
    for name, does in (
        ("check", "say whether the tree is patched, and whether it can be"),
        ("apply", "patch the tree; nothing if it is patched"),
        ("revert", "take the patch out, to the byte; nothing if it is not patched"),
    ):
        action.add_argument(f"--{name}", dest="action", action="store_const", const=name, help=does)
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a Megatron-LM checkout, or the site-packages of an installed megatron-core",
    )
    arguments = parser.parse_args(argv)
    try:
        core = find_core(arguments.path)
        patch = patch_for(core)
        before = set(states(core, patch))
        if arguments.action != "check":
            change(core, patch, revert=arguments.action == "revert")
    except Refused as reason:
        sys.exit(f"moeblaze_megatron.patch: {reason}")
    state = before.pop() if len(before) == 1 else "in part"
    what = {
        ("check", "before"): f"not patched; {patch.file.name} applies",
        ("check", "in part"): f"patched in part; --apply or --revert finishes {patch.file.name}",
        ("check", "after"): f"patched with {patch.file.name}",
        ("apply", "before"): f"patched with {patch.file.name}",
        ("apply", "in part"): f"was patched in part, and is now, with {patch.file.name}",
        ("apply", "after"): f"was patched with {patch.file.name} already, nothing changed",
        ("revert", "before"): "was not patched, nothing changed",
        ("revert", "in part"): f"was patched in part; {patch.file.name} taken out",
        ("revert", "after"): f"{patch.file.name} taken out",
    }[arguments.action, state]
    print(f"Megatron-Core {version_of(core)} in {core}: {what}")


if __name__ == "__main__":
    command.run(main)
