"""Outline of an HTML page: its open tags, and the resources it would fetch."""

from html.parser import HTMLParser


class Outline(HTMLParser):
    """The unclosed tags of a page, and the resources it would fetch from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br"} and not tag.startswith("!"):
            self.open.append(tag)
        self.fetched += [str(value) for name, value in attrs if name in {"src", "href", "xlink:href", "data"}]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
