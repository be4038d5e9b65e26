"""The site looks right in a real browser: nothing broken, nothing too wide, nothing fetched from elsewhere.

`python -m tests.browser site [pictures]`, after `make docs`. Chromium, without a window, opens each page twice, as wide
as a desk and as a telephone, from a server on this machine's loopback. A script in the page that holds them measures
and sends back what it found. With a second folder, pictures of some pages are left there, in light and in dark. Without
a browser on this machine nothing is checked, and it says so.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.server
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = (1280, 390)
SHOWN = (
    "index.html", "tutorial.html", "gallery.html", "mods.html", "slow.html", "gpus.html", "eight_bits.html",
    "benchmarks.html", "how_it_works.html", "reference/calls.html",
)  # fmt: skip
SCHEMES = ("light", "dark")
SETTLED = "new Promise((done) => setTimeout(done, 400))"  # the theme's script takes up the scheme behind `load`
LONGEST_S = 120

CHECK = """<!doctype html><title>check</title><body><script>
const pages = PAGES, widths = WIDTHS;
const settled = (frame) => new Promise((done) => { frame.onload = () => setTimeout(done, 50); });
(async () => {
  const found = [];
  for (const page of pages) for (const width of widths) {
    const frame = document.createElement("iframe");
    frame.style = `width: ${width}px; height: 900px; border: 0`;
    const ready = settled(frame);
    frame.src = "/" + page;
    document.body.append(frame);
    await ready;
    const inside = frame.contentDocument, root = inside.documentElement;
    const say = (what) => found.push(`${page}, ${width} wide: ${what}`);
    const images = [...inside.images];
    images.forEach((image) => { image.loading = "eager"; });
    await Promise.all(images.map((image) => image.decode().catch(() => say(`no picture at ${image.src}`))));
    if (root.scrollWidth > root.clientWidth + 1) say(`scrolls sideways, ${root.scrollWidth} wide`);
    if (inside.querySelector("article")?.innerText.length < 100) say("nearly empty");
    for (const { name } of frame.contentWindow.performance.getEntriesByType("resource"))
      if (!name.startsWith(location.origin) && !name.startsWith("data:")) say(`fetches ${name}`);
    frame.remove();
  }
  await fetch("/__found__", { method: "POST", body: JSON.stringify(found) });
})().catch((why) => fetch("/__found__", { method: "POST", body: JSON.stringify([`the check failed: ${why}`]) }));
</script>"""


def pages_of(folder: Path) -> list[str]:
    files = (path for path in folder.rglob("*.html") if path.name != "404.html")
    return sorted(path.relative_to(folder).as_posix() for path in files)


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Server(http.server.SimpleHTTPRequestHandler):
    """The site, the page that looks at it, and where that page sends what it found."""

    def __init__(self, *arguments: object, folder: Path, found: queue.Queue[list[str]], **options: object) -> None:
        self.folder, self.found = folder, found
        super().__init__(*arguments, directory=str(folder), **options)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path == "/__check__":
            self.send_check()
        else:
            super().do_GET()

    def send_check(self) -> None:
        body = CHECK.replace("PAGES", json.dumps(pages_of(self.folder))).replace("WIDTHS", json.dumps(WIDTHS)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, queue.Queue[list[str]]]]:
    """The address of the folder on the loopback, and where what was found arrives."""
    found: queue.Queue[list[str]] = queue.Queue()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, folder=folder, found=found))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", found
    finally:
        server.shutdown()


def command(program: str, profile: str, *arguments: str) -> list[str]:
    # Its sandbox is not to be had by root, nor in many containers. It opens pages of this repository alone.
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    return [program, *fixed, f"--user-data-dir={profile}", *arguments]


def answer(opened: subprocess.Popen[bytes], found: queue.Queue[list[str]]) -> list[str]:
    for _ in range(LONGEST_S):
        with contextlib.suppress(queue.Empty):
            return found.get(timeout=1)
        if opened.poll() is not None:
            return [f"the browser ended by itself, exit status {opened.returncode}"]
    return [f"the browser did not answer in {LONGEST_S} s"]


def problems(folder: Path, program: str) -> list[str]:
    """What is wrong with the pages of a folder, a line each."""
    if not pages_of(folder):
        return [f"there is no page in {folder}"]
    with serving(folder) as (address, found), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        port = "--remote-debugging-port=0"  # the browser stays open until it is ended
        opened = subprocess.Popen(
            command(program, profile, port, f"{address}/__check__"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return answer(opened, found)
        finally:
            opened.terminate()
            opened.wait(timeout=30)


class Pipe:
    """A browser without a window that takes commands of DevTools through a pipe, each a line of JSON that ends in 0."""

    def __init__(self, program: str, profile: str) -> None:
        (theirs, self.commands), (self.answers, back) = os.pipe(), os.pipe()
        self.number, self.unread = 0, b""
        # the browser reads at 3 and writes at 4
        lead = ["sh", "-c", f'exec "$@" 3<&{theirs} 4>&{back}', "sh"]
        self.opened = subprocess.Popen(
            [*lead, *command(program, profile, "--remote-debugging-pipe")],
            pass_fds=(theirs, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(back)

    def ask(self, method: str, session: str | None = None, **given: object) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": given} | ({"sessionId": session} if session else {})
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        return self.wait_for(lambda said: said.get("id") == self.number)["result"]

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            said, found, rest = self.unread.partition(b"\0")
            if not found:
                more = os.read(self.answers, 1 << 20)
                if not more:
                    raise RuntimeError("the browser ended by itself")
                self.unread += more
                continue
            self.unread = rest
            if wanted(message := json.loads(said)):
                return message

    def close(self) -> None:
        self.opened.terminate()
        self.opened.wait(timeout=30)
        os.close(self.commands)
        os.close(self.answers)


def screenshots(folder: Path, program: str, target: Path, shown: Sequence[str] = SHOWN, most: int = 2400) -> None:
    """A picture of each page as wide as a desk and at most `most` high, in each scheme: tutorial-dark.png."""
    target.mkdir(parents=True, exist_ok=True)
    with serving(folder) as (address, _), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        pipe = Pipe(program, profile)
        try:
            tab = pipe.ask("Target.createTarget", url="about:blank")["targetId"]
            session = pipe.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
            size = {"width": WIDTHS[0], "height": most, "deviceScaleFactor": 1, "mobile": False}
            pipe.ask("Emulation.setDeviceMetricsOverride", session, **size)
            pipe.ask("Page.enable", session)
            for scheme in SCHEMES:
                features = [{"name": "prefers-color-scheme", "value": scheme}]
                pipe.ask("Emulation.setEmulatedMedia", session, features=features)
                for page in shown:
                    pipe.ask("Page.navigate", session, url=f"{address}/{page}")
                    pipe.wait_for(lambda said: said.get("method") == "Page.loadEventFired")
                    pipe.ask("Runtime.evaluate", session, expression=SETTLED, awaitPromise=True)
                    picture = pipe.ask("Page.captureScreenshot", session, format="png")["data"]
                    name = page.removesuffix(".html").replace("/", "-")
                    (target / f"{name}-{scheme}.png").write_bytes(base64.b64decode(picture))
        finally:
            pipe.close()


def main(folder: Path, pictures: Path | None = None) -> int:
    program = browser()
    if program is None:
        print(f"not looked at in a browser: none of {', '.join(BROWSERS)} is here")
        return 0
    found = problems(folder, program)
    print("\n".join(found) or "every page of the site looks right in a browser")
    if pictures is not None:
        screenshots(folder, program, pictures)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
