"""Pictures that explain: the words of the field on one transfer, and who talks to whom."""

from __future__ import annotations

from canvas import BLUE, CELL, INK, MUTED, ORANGE, PALE, RULE, Canvas


def overview() -> Canvas:
    """The words of the field on one transfer between two regions."""
    canvas = Canvas(
        420,
        "Two regions train inner steps side by side. At a send, the outer gradient of one fragment leaves both regions. It "
        "crosses the slow link while training goes on: the overlap. At the landing the mean is there, and the outer step "
        "moves the global weights of the fragment, which are merged into the local weights.",
    )
    left, pitch, sent, landed, last = 196, 36, 5, 10, 16
    tops, height = (144, 314), 34

    def after(step: int) -> float:
        return left + pitch * step - 2.5

    send, land = after(sent), after(landed)
    canvas.box(left, 226, pitch * last - 5, 40, PALE, rx=8, stroke=RULE)
    canvas.text(left + 14, 251, "slow link", size=14, color=MUTED)
    high, low = tops[0] + height, tops[1]
    for y, other in ((high, low), (low, high)):
        points = ((send, y), (send + 30, y), (land, other), (land - 30, other))
        canvas.area(*points, fill=BLUE, fill_opacity=0.3, stroke=BLUE)
    canvas.box((send + land) / 2 - 40, 233, 80, 26, "#fff", rx=13, stroke=BLUE)
    canvas.text((send + land) / 2, 251, "transfer", size=14, bold=True, color=BLUE, anchor="middle")

    for number, top in enumerate(tops):
        canvas.text(22, top + 6, f"region {number}", size=15, bold=True)
        canvas.small(22, top + 22, "a machine, a", "rack or a cloud")
        for part in range(3):
            fill = BLUE if part == 1 else CELL
            canvas.box(130, top + 1 + 11.5 * part, 44, 9, fill, rx=2)
        for step in range(last):
            fill = "#bcd0fb" if sent <= step < landed else CELL
            canvas.box(left + pitch * step, top, pitch - 5, height, fill, rx=4)
            if step >= landed:
                canvas.box(left + pitch * step, top + 12.5, pitch - 5, 9, BLUE)
        canvas.line((send, top - 6), (send, top + height + 6), color=BLUE, width=2.5)
        canvas.line((land, top - 6), (land, top + height + 6), color=BLUE, width=2.5)
        canvas.dot(land, top + height / 2, 7, BLUE, stroke="#fff", stroke_width=2)

    top = tops[0]
    canvas.label(152, 92, "fragment", "a part of the model")
    canvas.line((152, 114), (152, top - 4), color=MUTED, width=1)
    canvas.label(left + pitch * 2.4, 92, "inner step", "inside the region")
    begin, end = left + pitch * 2, left + pitch * 3 - 5
    canvas.line((begin, top - 4), (begin, top - 12), (end, top - 12), (end, top - 4), color=MUTED, width=1)
    canvas.line(((begin + end) / 2, top - 12), ((begin + end) / 2, 114), color=MUTED, width=1)
    canvas.label(send, 34, "send", "the fragment's outer gradient leaves")
    canvas.line((send, 56), (send, top - 6), color=BLUE, width=1)
    canvas.label((send + land) / 2, 92, "overlap", "training goes on (5 steps)")
    canvas.arrow(((send + land) / 2, 124), (send + 3, 124), color=MUTED, width=1)
    canvas.arrow(((send + land) / 2, 124), (land - 3, 124), color=MUTED, width=1)
    canvas.label(land + 42, 34, "landing", "the mean of all regions is there")
    canvas.line((land, 56), (land, top - 6), color=BLUE, width=1)
    canvas.label(land + 18, 92, "outer step", "moves the global weights;", anchor="start")
    canvas.small(land + 18, 123, "the merge updates the local ones")

    bottom = tops[1] + height
    canvas.arrow((left, bottom + 30), (after(last), bottom + 30), color=MUTED, width=1)
    canvas.small(after(last), bottom + 50, "time, in inner steps", anchor="end")
    return canvas


def architecture() -> Canvas:
    """Regions, the coordinator, and what passes bytes on between two regions that nobody can call."""
    canvas = Canvas(
        560,
        "A coordinator decides who takes part and carries no training traffic. Region 0 has direct TCP links to regions 1 and 2. "
        "Regions 1 and 2 are behind a firewall and behind NAT and cannot reach each other: their transfers go through an SSH "
        "host or a bucket. With a secret, all of this is encrypted, and neither can read what it passes on.",
    )
    lefts, top, width, height = {1: 36.0, 0: 300.0, 2: 564.0}, 222, 200, 118
    middle = {region: left + width / 2 for region, left in lefts.items()}
    for region, start in ((1, 340.0), (0, 400.0), (2, 460.0)):
        end = middle[region]
        canvas.line((start, 108), (end, top), color=MUTED, width=1.5, stroke_dasharray="5 4")
        canvas.lock((start + end) / 2, (108 + top) / 2, MUTED)
    canvas.small(36, 150, "who takes part, heartbeats,", "where regions listen")
    canvas.small(764, 150, "with a secret: TLS 1.3, both", "ends prove that they have it", anchor="end")
    canvas.box(275, 24, 250, 84, PALE, rx=10, stroke=INK, stroke_width=1.5)
    canvas.text(400, 52, "Coordinator", size=17, bold=True, anchor="middle")
    canvas.text(
        400, 74, "decides who takes part", "carries no training traffic", color=MUTED, anchor="middle"
    )

    for begin, end in ((lefts[1] + width, lefts[0]), (lefts[2], lefts[0] + width)):
        canvas.arrow((begin, top + 60), (end, top + 60), color=BLUE, width=4)
        canvas.lock((begin + end) / 2, top + 60, BLUE)
        canvas.text((begin + end) / 2, top + 38, "TCP", bold=True, color=BLUE, anchor="middle")
        canvas.small((begin + end) / 2, top + 88, "direct", anchor="middle")
    between = 424
    for region, end in ((1, 300.0), (2, 500.0)):
        start = middle[region]
        canvas.arrow((start, top + height), (start, between + 33), (end, between + 33), color=ORANGE, width=4)
        canvas.lock(start, top + height + 54, ORANGE)
    canvas.text(middle[1] + 22, between - 34, "pair 1-2:", "neither calls the other", color=MUTED)
    canvas.box(300, between, 200, 66, "#fef6e7", rx=10, stroke=ORANGE, stroke_width=1.5)
    canvas.text(400, between + 27, "SSH host or bucket", size=17, bold=True, anchor="middle")
    canvas.text(400, between + 48, "passes bytes on", color=MUTED, anchor="middle")

    places = {0: "has an open port", 1: "behind a firewall", 2: "behind NAT"}
    for region, left in lefts.items():
        dashes = "7 5" if region else None
        canvas.box(
            left, top, width, height, PALE, rx=10, stroke=BLUE, stroke_width=2, stroke_dasharray=dashes
        )
        canvas.text(left + width / 2, top + 30, f"Region {region}", size=17, bold=True, anchor="middle")
        canvas.text(left + width / 2, top + 50, places[region], color=MUTED, anchor="middle")
        for number in range(4):
            x = left + 16 + 43.5 * number
            canvas.box(x, top + 68, 37, 32, "#fff", rx=4, stroke=INK)
            canvas.text(x + 18.5, top + 88.5, "GPU", size=12, anchor="middle")
    canvas.text(
        400,
        522,
        "An arrow points from the caller to the called one. With a bucket, no region needs a port.",
        "Locks: with a secret, regions encrypt what they send (AES-256-GCM), and nobody between them can read it.",
        color=MUTED,
        anchor="middle",
    )
    return canvas
