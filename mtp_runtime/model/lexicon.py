"""The words of the grammar. Every option list is free of prefixes of one another, so that a text has one derivation."""

from __future__ import annotations

SHE = (
    "Mira", "Sela", "Anwen", "Brida", "Clea", "Dorit", "Elin", "Fenna", "Greta", "Hilda", "Isolde", "Jutta",
)  # fmt: skip
HE = (
    "Tobin", "Orrin", "Aldo", "Bertram", "Casper", "Dagmund", "Egil", "Florian", "Gunther", "Hagen", "Ivo", "Jorin",
)  # fmt: skip
NAMES = tuple(name for pair in zip(SHE, HE, strict=True) for name in pair)

TRADES = {
    "baker": ("loaves", "cakes", "buns", "pies", "rolls"),
    "smith": ("nails", "hinges", "knives", "hooks", "locks"),
    "weaver": ("cloaks", "scarves", "blankets", "shawls", "rugs"),
    "potter": ("bowls", "jugs", "plates", "cups", "jars"),
    "gardener": ("plums", "apples", "pears", "cherries", "quinces"),
    "fisher": ("trout", "eels", "perch", "carp", "crabs"),
    "carpenter": ("chairs", "tables", "doors", "ladders", "shelves"),
    "herder": ("lambs", "goats", "geese", "hens", "calves"),
}

TOWNS = (
    "Oakford", "Elmstead", "Ravensby", "Thornwick", "Millbrook", "Hartley", "Stonegate", "Westerham",
)  # fmt: skip

PLACES = (
    "the old mill", "the north gate", "the river bridge", "the market square", "the stone tower", "the inn",
    "the chapel yard", "the apple orchard", "the harbour", "the long barn", "the castle court", "the well",
)  # fmt: skip

WEATHER = (
    "Rain fell on", "The sun shone on", "A cold wind blew over", "Fog lay around", "Snow came down on",
    "Clouds hung above",
)  # fmt: skip

VERBS = ("brought", "carried", "hauled")
DEALS = ("Soon", "There", "At noon")
CODAS = ("thanked", "praised", "hugged", "paid")

TRADE_OF = {name: list(TRADES)[index % len(TRADES)] for index, name in enumerate(NAMES)}
# What follows from what: (the ring, how many places further the next value may stand).
RINGS = {"weather": (WEATHER, (1, 2)), "actor": (NAMES, (1, 5, 11)), "place": (PLACES, (1, 5, 8))}
BUYER_STEPS = (2, 7, 13)
DAYS = tuple(range(14, 19))  # 14 days are more than 512 tokens
REQUEST = "tell the weather, who brought what to which place, and who bought how many of it."
TURN = "\x1e"  # stands between the user's request and the answer of a chat book; never reaches the tokenizer
