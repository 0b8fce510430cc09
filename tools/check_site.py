"""Check the built site: links lead to files, nothing comes from other servers, no page is wider than a phone.

    python tools/check_site.py [site]

The widths need Chromium; without it they are not checked.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
PHONE = 390  # CSS pixels
CHROMIUM = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--allow-file-access-from-files", "--disable-web-security", "--hide-scrollbars",
    "--dump-dom",
]  # fmt: skip
# One frame of a phone's width at a time; the widths of the documents in them end in the title.
FRAMES = """<title></title><body><script>
(async () => {
  const widths = {};
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    Object.assign(frame, {width: WIDTH, height: 800, src: page});
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    widths[page] = frame.contentDocument.documentElement.scrollWidth;
    frame.remove();
  }
  document.title = JSON.stringify(widths);
})();
</script>"""


class Addresses(HTMLParser):
    """The addresses on other servers that a page loads when it is opened, and the addresses that it links to."""

    def __init__(self) -> None:
        super().__init__()
        self.external: list[str] = []
        self.linked: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the address of a script, a style sheet, a picture or a link."""
        given = dict(attrs)
        if tag == "a":
            self.linked.append(given.get("href") or "")
        address = given.get(LOADED.get(tag, "")) or ""
        loads = tag != "link" or given.get("rel") not in {"canonical", "prev", "next"}
        if loads and re.match(r"(https?:)?//", address):
            self.external.append(address)


def wrong_addresses(page: Path) -> list[str]:
    """Return a message for each address on another server that a page loads, and for each link that leads nowhere."""
    parser = Addresses()
    parser.feed(page.read_text(encoding="utf-8"))
    paths = {address.partition("#")[0] for address in parser.linked if not re.match(r"[a-z]+:|/", address)}
    nowhere = sorted(path for path in paths if not (page.parent / path).exists())
    return [f"loads {address}" for address in parser.external] + [f"no file {path}" for path in nowhere]


def widths(pages: list[Path], chromium: str) -> dict[Path, int]:
    """Return the width of each page's content in CSS pixels, on a screen of a phone's width."""
    with tempfile.TemporaryDirectory() as folder:
        frames = Path(folder, "frames.html")
        addresses = json.dumps([page.resolve().as_uri() for page in pages])
        frames.write_text(FRAMES.replace("PAGES", addresses).replace("WIDTH", str(PHONE)), encoding="utf-8")
        command = [chromium, *CHROMIUM, f"--user-data-dir={folder}/profile", "--virtual-time-budget=600000"]
        done = subprocess.run([*command, frames.as_uri()], capture_output=True, text=True, timeout=600, check=True)
    title = re.search(r"<title>(.+?)</title>", done.stdout, re.DOTALL)
    if title is None:
        raise RuntimeError(f"{chromium} printed no widths:\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}")
    measured = json.loads(html.unescape(title[1]))
    return {page: measured[page.resolve().as_uri()] for page in pages}


def main() -> int:
    """Print the problems of the site; return 1 if there are any."""
    site = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "site"
    pages = sorted(site.rglob("*.html"))
    problems = [f"{page.relative_to(site)}: {message}" for page in pages for message in wrong_addresses(page)]
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium:
        for page, width in widths(pages, chromium).items():
            if width > PHONE:
                problems.append(f"{page.relative_to(site)}: {width} pixels wide on a screen of {PHONE}")
    else:
        print("no Chromium: the widths of the pages are not checked")
    print("\n".join([*problems, f"{len(pages)} pages, {len(problems)} problems"]))
    return int(bool(problems) or not pages)


if __name__ == "__main__":
    sys.exit(main())
