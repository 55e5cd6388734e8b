"""Checks every link of the built site: pages, files and anchors within it. ``python -m website.check_links site``."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := given.get(name))]
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}


def broken(site: Path) -> list[str]:
    """What leads nowhere, ``page: link`` each. Links to other hosts are not followed."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        if "gallery" in path.parts[len(site.parts) :] and path.name != "index.html":
            continue  # reports, which have tests of their own
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # served at any address
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def main() -> None:
    """Exit with 1 and the list where a link leads nowhere."""
    site = Path(sys.argv[1]).resolve()
    found = broken(site)
    sys.stdout.write("".join(f"{line}\n" for line in found) or "every link leads somewhere\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
