"""The exchanges the embedded pair is trained on: nine families, written from a seed.

Every answer follows from its question, so a greedy answer can be compared with the reference. Only
stories have a choice of wording; there `reference` is the likeliest wording. No third-party text is
used.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

HELD_OUT_SHARE = 0.06  # of all answers


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _words(
    "Ada Ben Cleo Dev Eva Finn Gita Hugo Iris Jon Kira Liam Mia Noor Omar Pia Quinn Rosa Sam "
    "Tara Uma Vik Wren Yara Zoe Alma Bruno Carla Dario Elsa Felix Greta Hana Ivan Jade Karl "
    "Lena Marco Nina Otto Petra Ravi"
)
LAST = _words(
    "Silva Khan Novak Okoro Lee Rossi Meyer Haddad Sato Cruz Larsen Patel Adler Brandt Costa "
    "Duarte Ekman Fischer Greco Holm Ito Jansen Kovac Lopez"
)
CITIES = _words(
    "Lisbon Oslo Cairo Lima Kyoto Delhi Paris Accra Quito Turin Bergen Perth Athens Bogota "
    "Dublin Geneva Hanoi Madrid Nairobi Prague Riga Seoul Tunis Vienna"
)
JOBS = _words(
    "nurse baker pilot teacher welder chemist farmer editor coder singer painter lawyer dentist "
    "tailor"
)
ITEMS = _words("apples pens stamps marbles cards shells books coins eggs tickets candles plums")
BOXES = _words("boxes bags crates baskets packs trays")
PLACES = _words("shop market school library farm station")
ANIMALS = _words("fox owl bear crab wolf mouse heron goat otter toad")
THINGS = _words("lantern map bell key kite drum mirror boat letter crown")
SCENES = (
    "by the river",
    "in the forest",
    "on a hill",
    "near the sea",
    "in an old tower",
    "under a bridge",
)
MOODS = _words("brave curious gentle clever sleepy proud")
TABLES = {
    "employees": ("name", "age", "city", "salary"),
    "orders": ("id", "price", "status", "city"),
    "books": ("title", "author", "year", "price"),
    "cars": ("model", "year", "price", "color"),
    "rooms": ("floor", "price", "beds", "city"),
    "players": ("name", "team", "score", "year"),
}
NUMERIC = frozenset({"age", "salary", "id", "price", "year", "floor", "beds", "score"})
# Filters of the code family: words -> Python condition.
FILTERS = (
    ("even", "{x} % 2 == 0"),
    ("odd", "{x} % 2 == 1"),
    ("positive", "{x} > 0"),
    ("negative", "{x} < 0"),
    ("nonzero", "{x} != 0"),
    ("greater than {k}", "{x} > {k}"),
    ("less than {k}", "{x} < {k}"),
    ("divisible by {k}", "{x} % {k} == 0"),
    ("equal to {k}", "{x} == {k}"),
)
# Operations of the code family: name -> (third person, imperative).
OPERATIONS = {
    "sum": ("returns the sum of", "Return the sum of"),
    "count": ("counts", "Count"),
    "largest": ("finds the largest of", "Find the largest of"),
    "smallest": ("finds the smallest of", "Find the smallest of"),
    "list": ("returns a list of", "Return a list of"),
    "product": ("returns the product of", "Return the product of"),
}


class Exchange(NamedTuple):
    """One question and its answer; `reference` is the answer greedy decoding should give."""

    family: str
    question: str
    answer: str
    reference: str


def addition(rng: random.Random) -> tuple[str, str]:
    """Column addition spelled out, from the ones up."""
    a, b = rng.randint(10, 999), rng.randint(10, 999)
    forms = (
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "Compute {a} + {b}.",
        "Find the sum of {a} and {b}.",
    )
    lines, carry, x, y = ["Add column by column."], 0, a, b
    for column in ("ones", "tens", "hundreds"):
        if not x and not y:
            break
        total = x % 10 + y % 10 + carry
        carried = f" + {carry}" if carry else ""
        written = f", write {total % 10}, carry 1." if total > 9 else "."
        lines.append(f"{column}: {x % 10} + {y % 10}{carried} = {total}{written}")
        carry, x, y = total // 10, x // 10, y // 10
    if carry:
        lines.append("next: write 1.")
    lines.append(f"So {a} + {b} = {a + b}.")
    return rng.choice(forms).format(a=a, b=b), "\n".join(lines)


def words(rng: random.Random) -> tuple[str, str]:
    """Word problems of one or two steps."""
    problem: Callable[..., tuple[str, list[str], str]] = rng.choice(
        (_give_away, _boxes, _share, _change, _drive, _together)
    )
    question, steps, conclusion = problem(rng, *rng.sample(FIRST, 2), rng.choice(ITEMS))
    numbered = [f"Step {i}: {step}" for i, step in enumerate(steps, 1)]
    return question, "\n".join([*numbered, f"Answer: {conclusion}"])


def _give_away(rng: random.Random, n: str, m: str, it: str) -> tuple[str, list[str], str]:
    a, b, c = rng.randint(11, 60), rng.randint(3, 39), rng.randint(2, 10)
    question = (
        f"{n} has {a} {it}. {n} buys {b} more and then gives {c} to {m}. "
        f"How many {it} does {n} have now?"
    )
    bought = f"After buying {b} more: {a} + {b} = {a + b}."
    given = f"After giving {c} to {m}: {a + b} - {c} = {a + b - c}."
    return question, [f"{n} starts with {a} {it}.", bought, given], f"{n} has {a + b - c} {it}."


def _boxes(rng: random.Random, n: str, m: str, it: str) -> tuple[str, list[str], str]:
    box, place = rng.choice(BOXES), rng.choice(PLACES)
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 30)
    question = (
        f"A {place} has {a} {box} with {b} {it} in each, and {c} loose {it}. "
        f"How many {it} are there in total?"
    )
    steps = [
        f"In the {box}: {a} * {b} = {a * b} {it}.",
        f"With the loose {it}: {a * b} + {c} = {a * b + c}.",
    ]
    return question, steps, f"There are {a * b + c} {it} in total."


def _share(rng: random.Random, n: str, m: str, it: str) -> tuple[str, list[str], str]:
    a, d = rng.randint(2, 9), rng.randint(2, 9)
    question = (
        f"{n} shares {a * d} {it} equally among {d} friends. How many {it} does each friend get?"
    )
    return (
        question,
        [f"Divide the {it} by the friends: {a * d} / {d} = {a}."],
        f"Each friend gets {a} {it}.",
    )


def _change(rng: random.Random, n: str, m: str, it: str) -> tuple[str, list[str], str]:
    p, c, money = rng.randint(2, 9), rng.randint(2, 9), rng.choice((50, 100))
    question = (
        f"One of the {it} costs {p} coins. {n} buys {c} of them and pays with {money} coins. "
        f"How much change does {n} get?"
    )
    steps = [
        f"The cost is {c} * {p} = {c * p} coins.",
        f"The change is {money} - {c * p} = {money - c * p} coins.",
    ]
    return question, steps, f"{n} gets {money - c * p} coins back."


def _drive(rng: random.Random, n: str, m: str, it: str) -> tuple[str, list[str], str]:
    v, t = rng.randint(3, 9) * 10, rng.randint(2, 9)
    question = f"{n} drives at {v} km per hour for {t} hours. How far does {n} go?"
    return (
        question,
        ["Distance is speed times time.", f"{v} * {t} = {v * t}."],
        f"{n} goes {v * t} km.",
    )


def _together(rng: random.Random, n: str, m: str, it: str) -> tuple[str, list[str], str]:
    a, b = rng.randint(5, 40), rng.randint(2, 30)
    question = (
        f"{n} has {a} {it}. {m} has {b} more {it} than {n}. How many {it} do they have together?"
    )
    steps = [
        f"{m} has {a} + {b} = {a + b} {it}.",
        f"Together they have {a} + {a + b} = {2 * a + b} {it}.",
    ]
    return question, steps, f"They have {2 * a + b} {it} together."


def code(rng: random.Random) -> tuple[str, str]:
    """A small Python function over a filtered list."""
    items, x = rng.choice(
        (("numbers", "n"), ("values", "v"), ("items", "x"), ("scores", "s"), ("data", "d"))
    )
    what, condition = rng.choice(FILTERS)
    k = rng.randint(2, 30)
    what, condition = what.format(k=k), condition.format(x=x, k=k)
    op = rng.choice(tuple(OPERATIONS))
    third, imperative = OPERATIONS[op]
    if op in ("largest", "smallest"):
        sign = ">" if op == "largest" else "<"
        start, update = (
            "best = None",
            [f"    if best is None or {x} {sign} best:", f"        best = {x}"],
        )
    elif op == "list":
        start, update = "result = []", [f"    result.append({x})"]
    else:
        first, change = {
            "sum": ("0", f"+= {x}"),
            "count": ("0", "+= 1"),
            "product": ("1", f"*= {x}"),
        }[op]
        start, update = f"total = {first}", [f"    total {change}"]
    body = [
        start,
        f"for {x} in {items}:",
        f"    if {condition}:",
        *(f"    {line}" for line in update),
    ]
    body.append(f"return {start.split()[0]}")
    head = [
        f"def {op}_{what.replace(' ', '_')}({items}):",
        f'    """{imperative} the {items} that are {what}."""',
    ]
    forms = (
        "Write a Python function that {}.",
        "Give me a Python function that {}.",
        "In Python, write a function that {}.",
    )
    answer = "\n".join(["```python", *head, *(f"    {line}" for line in body), "```"])
    return rng.choice(forms).format(f"{third} the {items} that are {what}"), answer


def as_json(rng: random.Random) -> tuple[str, str]:
    """Extraction of one to three people into JSON."""
    people = [
        {
            "name": f"{rng.choice(FIRST)} {rng.choice(LAST)}",
            "age": rng.randint(18, 79),
            "city": rng.choice(CITIES),
            "job": rng.choice(JOBS),
        }
        for _ in range(rng.choice((1, 1, 2, 2, 3)))
    ]
    forms = (
        "{name}, {age}, lives in {city} and works as a {job}.",
        "{name} is a {job} from {city}, aged {age}.",
    )
    text = " ".join(rng.choice(forms).format(**person) for person in people)
    request = rng.choice(
        ("Turn this into JSON: ", "Write as JSON: ", "Extract the people as JSON. ")
    )
    body = json.dumps(people if len(people) > 1 else people[0], indent=2)
    return request + text, f"```json\n{body}\n```"


def counting(rng: random.Random) -> tuple[str, str]:
    """Counting up or down in steps."""
    step, low, n = rng.choice((1, 2, 3, 4, 5, 10)), rng.randint(0, 60), rng.randint(6, 18)
    numbers = [low + step * i for i in range(n + 1)]
    if rng.random() < 0.5:
        numbers.reverse()
    verb = "Count from" if numbers[0] == low else "Count down from"
    return f"{verb} {numbers[0]} to {numbers[-1]} in steps of {step}.", ", ".join(
        map(str, numbers)
    ) + "."


def tables(rng: random.Random) -> tuple[str, str]:
    """A times table, from 1 or from a later row."""
    a, first, rows = rng.randint(2, 25), rng.choice((1, 1, 2, 3, 4, 5)), rng.randint(6, 10)
    last = first + rows - 1
    forms = (
        "Write the {a} times table from {first} to {last}.",
        "Show the times table of {a} from {first} to {last}.",
    )
    question = rng.choice(forms).format(a=a, first=first, last=last)
    return question, "\n".join(f"{a} x {i} = {a * i}" for i in range(first, last + 1))


def sorting(rng: random.Random) -> tuple[str, str]:
    """Sorting four to nine numbers."""
    numbers = [rng.randint(1, 99) for _ in range(rng.randint(4, 9))]
    down = rng.random() < 0.4
    ordered = sorted(numbers, reverse=down)
    order, first, last = (
        ("from high to low", "largest", "smallest")
        if down
        else ("from low to high", "smallest", "largest")
    )
    listed = ", ".join(map(str, numbers))
    summary = f"The {first} is {ordered[0]} and the {last} is {ordered[-1]}."
    return (
        f"Sort these numbers {order}: {listed}.",
        f"Sorted: {', '.join(map(str, ordered))}.\n{summary}",
    )


def sql(rng: random.Random) -> tuple[str, str]:
    """A query with a filter and an order."""
    table = rng.choice(tuple(TABLES))
    columns = TABLES[table]
    selected = rng.sample(columns, rng.randint(1, 3))
    column, order = rng.choice([c for c in columns if c in NUMERIC]), rng.choice(columns)
    limit = rng.randint(1, 99) * rng.choice((1, 10))
    above, descending = rng.random() < 0.5, rng.random() < 0.5
    question = (
        f"Write a SQL query for the {' and '.join(selected)} of {table} with {column} "
        f"{'above' if above else 'below'} {limit}, "
        f"ordered by {order}{' descending' if descending else ''}."
    )
    lines = [
        f"SELECT {', '.join(selected)}",
        f"FROM {table}",
        f"WHERE {column} {'>' if above else '<'} {limit}",
        f"ORDER BY {order}{' DESC' if descending else ''};",
    ]
    return question, "\n".join(["```sql", *lines, "```"])


def story(rng: random.Random) -> tuple[str, str, str]:
    """A six-sentence story; each sentence has a likely wording and rarer ones."""
    hero, other = rng.sample(ANIMALS, 2)
    thing, scene, mood = rng.choice(THINGS), rng.choice(SCENES), rng.choice(MOODS)
    question = (
        f"Tell me a short story about {_a(mood)} {hero} {scene}, {_a(other)} and {_a(thing)}."
    )
    sentences = (
        (
            f"Once upon a time, {_a(mood)} {hero} lived {scene}.",
            f"There was once {_a(mood)} {hero} who lived {scene}.",
        ),
        (
            f"One day, the {hero} found {_a(thing)} in the grass.",
            f"One night, the {hero} heard of a lost {thing}.",
        ),
        (f'"Whose {thing} is this?" asked the {hero}.', f'"What a fine {thing}!" said the {hero}.'),
        (
            f"Soon the {hero} met {_a(other)}, who had been looking for the {thing} all day.",
            f"Then {_a(other)} came by and began to cry, for the {thing} was gone.",
        ),
        (
            f"The {hero} gave the {thing} back, and the {other} was very happy.",
            f"The {hero} smiled and handed the {thing} to the {other}.",
        ),
        (
            f"From that day on, the {hero} and the {other} were good friends.",
            f"And so the {hero} and the {other} shared the {thing} for the rest of their days.",
        ),
    )
    told = " ".join(wordings[rng.random() < 0.25] for wordings in sentences)
    return question, told, " ".join(wordings[0] for wordings in sentences)


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


# Family -> (generator, weight among documents).
FAMILIES: dict[str, tuple[Callable[[random.Random], tuple[str, ...]], float]] = {
    "add": (addition, 4),
    "code": (code, 2.5),
    "count": (counting, 3.5),
    "json": (as_json, 4),
    "sort": (sorting, 4),
    "sql": (sql, 3),
    "story": (story, 2),
    "table": (tables, 3),
    "word": (words, 4),
}


def exchanges(seed: int) -> Iterator[Exchange]:
    """An endless, seeded stream of exchanges of all families."""
    rng = random.Random(seed)
    names = tuple(FAMILIES)
    weights = [weight for _, weight in FAMILIES.values()]
    while True:
        family = rng.choices(names, weights)[0]
        question, answer, *modal = FAMILIES[family][0](rng)
        yield Exchange(family, question, answer, modal[0] if modal else answer)


def held_out(exchange: Exchange) -> bool:
    """Whether an exchange is kept from training; only its *answer* decides, not the question."""
    digest = hashlib.md5(exchange.reference.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32
