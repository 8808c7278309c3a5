"""Chromium without a screen, asked as WebDriver has it: JSON over HTTP to Debian's chromedriver."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.request

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
MISSING = "Chromium is missing, so nothing opens the report: apt-get install chromium chromium-driver"


def programs():
    """The browser and its driver, None where one of them is not installed."""
    found = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    return found if all(found) else None


class Browser:
    """One window. `script` returns what JavaScript returns; `rows`, `press` and `words` are what the tests ask most."""

    def __init__(self, port, arguments):
        self._address = f"http://127.0.0.1:{port}"
        options = {"binary": programs()[0], "args": arguments}
        asked = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._session = f"/session/{self._ask('/session', {'capabilities': {'alwaysMatch': asked}})['sessionId']}"

    def _ask(self, path, body=None, method=None):
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}{path}", content, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with _DIRECTLY.open(request) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url):
        self._ask(f"{self._session}/url", {"url": str(url)})

    def script(self, text, *arguments):
        return self._ask(f"{self._session}/execute/sync", {"script": text, "args": list(arguments)})

    def _element(self, css):
        (found,) = self._ask(f"{self._session}/element", {"using": "css selector", "value": css}).values()
        return f"{self._session}/element/{found}"

    def press(self, css):
        self._ask(f"{self._element(css)}/click", {})

    def type(self, css, text):
        self._ask(f"{self._element(css)}/value", {"text": text})

    def words(self, css):
        """What a reader sees of an element."""
        return self._ask(f"{self._element(css)}/text")

    def choose(self, css, value):
        """An option of a menu, as a person does it: the menu tells that it changed."""
        self.script(
            "const menu = document.querySelector(arguments[0]); menu.value = arguments[1];"
            "menu.dispatchEvent(new Event('input', {bubbles: true}))", css, value,
        )  # fmt: skip

    def column(self, name):
        """The cells of that class in the rows that are shown, from the first to the last."""
        return self.script(
            "return [...document.querySelectorAll('#records tbody tr')].filter((row) => !row.hidden)"
            ".map((row) => row.querySelector(`.${arguments[0]}`).textContent)", name,
        )  # fmt: skip

    def complaints(self):
        """What the browser wrote to its console since it was last asked: errors, and what the policy refused."""
        return [entry["message"] for entry in self._ask(f"{self._session}/se/log", {"type": "browser"})]

    def look(self, width, height=900, *, dark=False):
        """A screen of so many pixels, of a reader who likes it light or dark."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._tools("Emulation.setDeviceMetricsOverride", sizes)
        liked = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._tools("Emulation.setEmulatedMedia", {"features": liked})

    def picture(self):
        """A PNG of the window, in base64."""
        return self._ask(f"{self._session}/screenshot")

    def _tools(self, command, parameters):
        """What only the protocol of Chromium's own tools can do."""
        return self._ask(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self):
        self._ask(self._session, method="DELETE")


@contextlib.contextmanager
def opened(*arguments):
    """A browser of its own, ended with its driver."""
    command = [programs()[1], "--port=0"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        # "ChromeDriver was started successfully on port 35311."
        said = next(line for line in driver.stdout if "successfully on port" in line)
        port = int(said.rpartition("port ")[2].strip().rstrip("."))
        browser = Browser(port, ["--headless", "--no-sandbox", "--disable-gpu", *arguments])
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait()
        driver.stdout.close()
