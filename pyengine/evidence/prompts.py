"""The built-in prompts of the parity check: varied texts, written for it, under one version number.

The texts are cut by tokens, never by characters, so that every model is asked the same kinds of
question at the lengths it can take: from one token up to its context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

VERSION = 1
"""Raised whenever a text or a length changes; every report and reference file names it."""

MAX_TOKENS = 400
"""Longest prompt cut from a single text; the last prompt alone goes up to the model's context."""

MAX_WHOLE_TOKENS = 512
"""Longest prompt of all: every text one after the other. Costs grow with its square."""


@dataclass(frozen=True)
class Text:
    """One text: a name for reports, what kind of text it is, and how many tokens to keep."""

    name: str
    kind: str
    tokens: int
    text: str


@dataclass(frozen=True)
class Prompt:
    """Token ids to compare on.

    Attributes:
        name: the text's name.
        kind: what kind of text it is.
        ids: token ids, at least one.
        natural: whether it is ordinary language, on which a trained model must beat a guess.
    """

    name: str
    kind: str
    ids: tuple[int, ...]
    natural: bool = True


_HARBOUR = """\
The harbour master kept two books. In the first he wrote what the law required of him: the name of
each vessel, her flag, her tonnage, the hour at which she passed the light and the hour at which
she tied up. In the second, which he kept at home in the drawer with the string, he wrote what he
had seen. A cook who fed the gulls from a silver spoon. A captain who walked down the gangway
backwards, as if he were still climbing aboard. Nobody had asked him for the second book, and
nobody knew of it until the winter when the office burned and the first book with it. Then the
insurers came, with their hats in their hands, and wanted to know which ships had been in port
on the night of the ninth of November. He opened the drawer, put the string to one side, and
began to read to them. He read about the rain, and about a dog that had learned to tell the
ferry from the mail boat by the sound of the engine. He read for most of an hour. The insurers
wrote nothing down. When he had come to the end he closed the book and said that there had been
eleven ships, that he could describe every one of them, and that he was sorry that he had never
thought it worth his while to note their names. The oldest of the men laughed first. After a
while the others did too, and somebody put the kettle on, and they stayed until the ferry came
in, which they heard, all of them at once, before the dog did. The report that they sent to the
city was short. It said that the loss was total and that the witness was reliable.
"""

_SCRIPTURE = """\
And it came to pass in the seventh year of the drought that the people of the valley went up to
the house of the elder and said unto him, Behold, the wells are dry, and the cattle lie down in
the way, and our children ask us for water and we have none to give. And the elder answered them,
saying, Have ye digged in the field of thy brother? And they said, Nay, for it is not ours. Then
he rose up, and took his staff, and went before them to the field, and struck the ground with it
three times; and he said unto the owner of the field, Is this ground thine? And he said, It is
mine, and my father's before me. And the elder said, And whose is the water that is under it? And
the man was silent, and all the people with him. Then they digged together, the sons of the one
house and the sons of the other, from the rising of the sun until the going down of the same, and
on the third day they found water; and it was sweet. And they called the name of that place The
Well of the Answer, because the man had not answered, and that was better than many words. Now
the rest of the deeds of the elder, and the wall that he built, and the two mules that he bought
from the merchants and could not sell again, are they not told by the women at the well unto this
day? And he died in a good old age, and they buried him in the field, beside the water.
"""

_MANUAL = """\
NAME
    sift - select lines of a table by a condition

SYNOPSIS
    sift [-hv] [-d CHAR] [-o FILE] CONDITION [FILE ...]

DESCRIPTION
    sift reads each FILE, or standard input if none is given, and writes those lines for which
    CONDITION holds. A line is split into fields at the delimiter, which is a tab unless the
    option -d names another character. Fields are numbered from 1; field 0 is the whole line.
    An empty file is not an error. A file that does not exist is: sift reports it on standard
    error, goes on with the next one and returns 2 when it has finished.

OPTIONS
    -d CHAR   split at CHAR instead of the tab. Two delimiters in a row make an empty field.
    -h        print this text and exit.
    -o FILE   write to FILE instead of standard output. The file is made anew; if the command
              fails before the first line is written, an existing file is left as it was.
    -v        invert the condition: write the lines for which it does not hold.

EXIT STATUS
    0 if at least one line was written, 1 if none was, 2 if an error occurred. The status of a
    pipeline is that of its last command, so that sift can be used directly in a test.

EXAMPLES
    List the accounts whose shell is not the default one:
        sift -d : '$7 != "/bin/sh"' /etc/passwd
    Count the requests that took longer than two seconds:
        sift '$4 > 2000' access.tsv | wc -l

BUGS
    Numbers are compared as numbers and everything else as text, which surprises people whose
    version strings look like numbers. There is no way to quote a delimiter inside of a field.
"""

_CODE = '''\
from dataclasses import dataclass, replace, field


@dataclass
class Interval:
    """A half-open range [start, stop) of integers."""

    start: int
    stop: int
    tags: set[str] = field(default_factory=set)

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def overlaps(self, other: "Interval") -> bool:
        return self.start < other.stop and other.start < self.stop


def merge(intervals: list[Interval]) -> list[Interval]:
    """Joins intervals that touch or overlap; the result is sorted and disjoint."""
    merged: list[Interval] = []
    for item in sorted(intervals, key=lambda interval: (interval.start, interval.stop)):
        if merged and item.start <= merged[-1].stop:
            merged[-1].stop = max(merged[-1].stop, item.stop)
            merged[-1].tags |= item.tags
        else:
            merged.append(Interval(item.start, item.stop, set(item.tags)))
    return merged


static int32_t saturate(int64_t value) {
    if (value > INT32_MAX) return INT32_MAX;
    if (value < INT32_MIN) return INT32_MIN;
    return (int32_t)value; /* exact from here on */
}

for (size_t i = 0; i + 1 < n; ++i) { sum[i + 1] = saturate((int64_t)sum[i] + delta[i]); }

SELECT name, COUNT(*) AS visits FROM guests WHERE left_at IS NULL GROUP BY name HAVING visits > 3;
{"id": 7, "path": "/a/b%20c", "ok": true, "size": null, "ratio": -1.25e-3, "list": [[], [0], {}]}
if [ -z "${HOME:-}" ]; then echo "no home" >&2; exit 64; fi
'''

_LETTER = """\
Dear Ines,

thank you for the seeds. I have put the beans by the south wall, as you said, and the other ones,
which you did not name, into the three blue pots, so that I shall find out what they are before
the frost does. You ask whether I am lonely. I am busy, which is not an answer, but it is what I
have. On Monday the roofer came and would not go up because of the wind; on Tuesday the wind had
gone and so had the roofer. On Wednesday I went up myself. From there you can see as far as the
old quarry, and I sat for a long time beside the chimney with a tile in each hand and did not
think of anything at all. I recommend it. Your brother writes that he will come "some time in
June", and since he did not say which June I have aired the room. Is he still afraid of geese? If
so, do not tell him. What else: the clock in the hall has begun to strike thirteen, but only at
four in the morning; the baker's daughter has been offered a place at the school for surveyors,
and does not know yet whether she wants to measure things for the rest of her life; and the
bridge is to be closed for repairs, so that everybody who wishes to visit me must come either by
the long road or by boat. I hope that you will come by boat. Bring your grey coat, the evenings
are cool, and bring the second volume, because I have lent out the first one and can only be
fair to both of them by reading neither or by starting in the middle.

With love, and with earth under my nails,
M.
"""

_SCRIPTS = """\
Guten Tag! Größe und Maß, süße Äpfel, fünf Öfen. Où est la bibliothèque ? Çà et là, l'été, naïf.
¿Dónde está el niño? ¡Mañana será otro día! Příliš mnoho vody ve sklepě. Łódź, żółw, gęś, ćma.
Το νερό είναι κρύο και η θάλασσα ήσυχη. Сегодня утром шёл дождь, а вечером выглянуло солнце.
今日は雨が降っているので、本を読みます。水是冷的,海很安静。오늘은 비가 와서 집에 있어요.
בבוקר ירד גשם ובערב יצאה השמש. في الصباح نزل المطر. सुबह बारिश हुई। เช้านี้ฝนตก
x² + y² ≤ r², ∑ᵢ aᵢ ≈ π/4, ∀ε>0 ∃δ>0, A ⊆ B ⇒ |A| ≤ |B|; 20 °C ± 0,5 K; € 5,– → £ 4.30 → ¥ 800
🙂 👩‍🚀 🇮🇸 ✔︎ ½ … “quoted” ‘text’ – dash — no‑break é (one) é (two) ﬁ ＡＢＣ １２３
Hver dag går han ned til vannet. Her gün suya iniyor. Mỗi ngày anh ấy đi xuống bờ nước.
"""

_DIALOGUE = """\
"You said ten minutes."
"I said about ten minutes."
"It is dark, Tobias."
"It was always going to be dark. That is what evenings are for." He put the lamp on the table and
turned it so that the light fell on the map and not on his face. "Where did we stop?"
"At the ford."
"At the ford. Then the road goes left, doesn't it? It goes left, and up, and there is a mill."
"There was a mill. They took it down and sold the stones. We went past it, I showed you."
"You showed me a meadow!"
"I showed you where the mill was."
He thought about that. Somewhere in the house a door closed, and then another one, nearer. "So if
I were to draw it," he said slowly, "I ought to draw the meadow."
"If you want people to find the road, yes. If you want them to know why the road bends there, you
had better draw the mill."
"And if I want both?"
"Then you need two maps," she said, "or one man who can remember things." She leaned over and blew
out the lamp. "Come. They are waiting with the soup, and you told them ten minutes as well."
"About ten minutes," said Tobias in the dark.

* glacier: a slow river of ice that carries stones on its back
* hinge: the part of a door that does not go anywhere
* ledger: a book in which money is remembered
* tide: the sea's habit of leaving and coming back, twice a day
"""


def _numbers() -> str:
    """Arithmetic as text, because tokenizers split digits in every possible way."""
    rows = [f"{a} x {b} = {a * b}" for a in (3, 7, 12, 99) for b in range(2, 14)]
    primes = [n for n in range(2, 400) if all(n % d for d in range(2, int(n**0.5) + 1))]
    dates = [f"{1990 + 3 * i}-{1 + 5 * i % 12:02d}-{1 + 11 * i % 28:02d}" for i in range(16)]
    halves = [f"{1 / 2**i:.{min(i, 8)}f}" for i in range(1, 14)]
    powers = [str(7**i) for i in range(1, 20)]
    lines = ["; ".join(rows), ", ".join(map(str, primes)), f"{len(primes)} primes below 400"]
    return "\n".join([*lines, *dates, " ".join(halves), " ".join(powers), ""])


TEXTS: tuple[Text, ...] = (
    Text("one", "a single token", 1, "The"),
    Text("two", "two tokens", 2, "In the"),
    Text("phrase", "a short phrase", 7, "And in the morning the water was cold"),
    Text("sentence", "one sentence", 33, _LETTER[12:300]),
    Text("scripts", "many scripts and signs", MAX_TOKENS, _SCRIPTS * 2),
    Text("numbers", "numbers", MAX_TOKENS, _numbers()),
    Text("code", "code in several languages", MAX_TOKENS, _CODE),
    Text("repeated", "one token again and again", 257, " the" * 600),
    Text("cycle", "a short cycle", 128, "left right up down " * 200),
    Text("manual", "a manual page", MAX_TOKENS, _MANUAL),
    Text("dialogue", "dialogue and a word list", MAX_TOKENS, _DIALOGUE),
    Text("letter", "a letter", MAX_TOKENS, _LETTER),
    Text("harbour", "narrative prose", MAX_TOKENS, _HARBOUR),
    Text("scripture", "archaic prose", MAX_TOKENS, _SCRIPTURE),
)
"""All texts, shortest first where length is the point, ordinary language last."""

_NATURAL = ("manual", "dialogue", "letter", "harbour", "scripture", "whole")


def make_prompts(
    encode: Callable[[str], Sequence[int]],
    *,
    max_tokens: int,
    positions: int | None = None,
    texts: Sequence[Text] = TEXTS,
    exact: Sequence[int] = (),
) -> list[Prompt]:
    """The built-in texts as token ids, none longer than the model allows.

    Args:
        encode: text to token ids, without a beginning-of-text token where the caller wants none.
        max_tokens: the model's context, or a smaller limit.
        positions: at most this many positions in total, as `limit` spreads them.
        texts: other texts to use in place of the built-in ones.
        exact: further prompts of exactly these lengths, beside the `positions`.

    Returns:
        One prompt per text; of the built-in ones also all in a row, up to 512 tokens.
    """
    prompts: list[Prompt] = []
    for text in texts:
        ids = tuple(encode(text.text))[: min(text.tokens, max_tokens)]
        prompts.append(Prompt(text.name, text.kind, ids, text.name in _NATURAL))
    whole = tuple(encode("\n".join(text.text for text in reversed(texts))))
    if texts is TEXTS:
        ids = whole[: min(MAX_WHOLE_TOKENS, max_tokens)]
        prompts.append(Prompt("whole", "all texts in a row", ids))
    prompts = [prompt for prompt in prompts if prompt.ids]
    if positions is not None:
        prompts = limit(prompts, positions)
    for length in exact:
        if length <= min(len(whole), max_tokens):
            prompts.append(Prompt(f"exactly-{length}", "a given length", whole[:length]))
    return prompts


def limit(prompts: Sequence[Prompt], positions: int) -> list[Prompt]:
    """The prompts cut so that their lengths add up to at most `positions`.

    The longest one keeps up to half of them, since rotary tables, windows and biases go wrong with
    distance; the others share the rest evenly, since variety finds the other mistakes.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids), i))
    keep = dict.fromkeys(order, 0)
    left = positions
    if order:
        keep[order[-1]] = min(len(prompts[order[-1]].ids), (positions + 1) // 2)
        left -= keep[order[-1]]
    for done, i in enumerate(order[:-1]):
        keep[i] = min(len(prompts[i].ids), left // (len(order) - 1 - done))
        left -= keep[i]
    return [replace(p, ids=p.ids[: keep[i]]) for i, p in enumerate(prompts) if keep[i]]


def context_of(config: Mapping[str, Any]) -> int:
    """Most tokens that a prompt may have by a config.json: its context, at most 512."""
    keys = ("n_positions", "max_position_embeddings")
    limits = [int(config[key]) for key in keys if config.get(key)]
    return min([MAX_WHOLE_TOKENS, *limits])


def switch_lengths(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Lengths around the one at which longrope changes its factors, if that is in reach."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("type", scaling.get("rope_type")) != "longrope":
        return ()
    key = "original_max_position_embeddings"
    switch = int(config.get(key) or scaling.get(key) or 0)
    return (switch - 1, switch, switch + 1) if 1 < switch < context_of(config) else ()
