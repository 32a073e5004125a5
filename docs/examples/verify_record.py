"""Verify the record of a service from outside, with nothing but Python: verify_record.py ADDRESS [ANCHORS]

It reads GET /api/record to the end, computes every digest again, and compares the chain with the anchors in a file of
JSON lines, if one is given. The exit code is 1 when something is wrong. docs/record.md says what a record has.
"""

import hashlib
import json
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def pages(address: str) -> Iterator[list[dict[str, Any]]]:
    after: int | None = 0
    while after is not None:
        with urllib.request.urlopen(f"{address}/api/record?after={after}") as answer:
            page = json.load(answer)
        yield page["links"]
        after = page["next"]


def verify(address: str, anchors: dict[int, str]) -> Iterator[str]:
    position, digest, kinds = 0, bytes(32), Counter[str]()
    for link in (link for links in pages(address) for link in links):
        position += 1
        if link["position"] != position:
            yield f"position {position}: the link is gone"
            position = link["position"]
        if link["record"] is None:
            yield f"position {position}: the record is gone"
        elif hashlib.sha256(link["record"].encode()).hexdigest() != link["recordDigest"]:
            yield f"position {position}: the record was changed"
        else:
            kinds[json.loads(link["record"]).get("kind", "invocation")] += 1
        digest = hashlib.sha256(digest + bytes.fromhex(link["recordDigest"])).digest()
        if link["digest"] != digest.hex():
            yield f"position {position}: the link does not follow from its predecessor"
            digest = bytes.fromhex(link["digest"])
        if anchors.pop(position, link["digest"]) != link["digest"]:
            yield f"position {position}: the chain was rebuilt before this anchor"
    for beyond in sorted(anchors):
        yield f"position {beyond}: the chain is cut off before this anchor"
    print(f"{position} links, the head is {digest.hex()}: {dict(kinds)}")


lines = Path(sys.argv[2]).read_text().splitlines() if len(sys.argv) > 2 else []
anchored: dict[int, str] = {}
problems = [
    f"position {anchor['position']}: the anchors contradict each other"
    for anchor in map(json.loads, filter(str.strip, lines))
    if "register" not in anchor  # of an exam
    and anchored.setdefault(anchor["position"], anchor["digest"]) != anchor["digest"]
]
problems += verify(sys.argv[1].rstrip("/"), anchored)
print("\n".join(problems) or "intact")
sys.exit(bool(problems))
