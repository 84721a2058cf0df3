"""How people ask: question forms, polite words, sloppy typing, and questions we cannot answer."""

import re
from random import Random
from typing import Final

from pdserve.demo.texts import read_words

_ALTERNATIVES: Final = re.compile(r"\(([^()]*\|[^()]*)\)")

WHAT: Final[tuple[str, ...]] = (
    "What is {}?",
    "What are {}?",
    "What's {}?",
    "What does {} mean?",
    "What do you mean by {}?",
    "What exactly is {}?",
    "{}?",
    "{}",
    "Explain {}",
    "Define {}",
    "Describe {}",
    "Tell me about {}",
    "Tell me what {} is",
    "Tell me something about {}",
    "Can you explain {}?",
    "Can you explain what {} means?",
    "Can you tell me what {} is?",
    "Could you describe {} to me?",
    "Could you please explain {}?",
    "Give me a (short |simple |quick |)(definition|explanation|description) of {}",
    "How would you (define|describe|explain) {}?",
    "Help me (to |)understand {}",
    "I (do not|don't) (know|understand) what {} is",
    "I (have|) never heard of {}",
    "What should I know about {}?",
    "What do you know about {}?",
    "I want to (learn|know) (more |)about {}",
    "Do you know what {} is?",
    "Do you know {}?",
    "What is the meaning of {}?",
    "What does {} stand for?",
    "What does {} do?",
    "(Can|Could) you give me (an|a rough|a short) (idea|overview) of what {} (is|means|does)?",
    "(I'd|I would) (like|love) to (know|understand|hear) what {} (is|means)",
    "What (kind of thing|thing) is {}?",
    "(Remind|Teach|Show) me what {} (is|means)",
    "In (simple|a few|other) words, what is {}?",
)
WHY: Final[tuple[str, ...]] = (
    "Why (is|are) {} (important|needed|useful|there|necessary|interesting|relevant)?",
    "Why (do|does) {} (matter|exist)?",
    "Why do (we|I|you) (need|want|use|have) {}?",
    "Why does pdserve (use|need|have) {}?",
    "What is {} (good|used) for?",
    "What is the (purpose|point|use|benefit|advantage) of {}?",
    "(What for|For what) do (we|I) need {}?",
    "What do (we|I) need {} for?",
    "Why {}?",
    "What makes {} (important|useful)?",
    "Why should I (care about|use) {}?",
    "Does {} matter?",
    "What (is|'s) the role of {}?",
    "What role does {} play?",
    "What would (happen|go wrong) without {}?",
    "(Tell me|Explain|Say) (why|what) {} is (good for|needed|useful|important)",
    "Is {} (important|needed|useful)?",
)
HOW: Final[tuple[str, ...]] = (
    "How (does|do) {} work?",
    "How (is|are) {} (done|made|implemented|computed|measured)?",
    "How does {} work (inside|internally|exactly|in detail)?",
    "Explain how {} works",
    "Can you explain how {} works?",
    "Tell me how {} works",
    "Describe how {} works",
    "What happens (during|in|inside) {}?",
    "What happens inside of {}?",
    "In what way does {} work?",
    "What does {} do exactly?",
    "How does {} function?",
)
JSON: Final[tuple[str, ...]] = (
    "(What is|Explain|Define|Describe) {}(? | )(Answer|Reply|Respond) (in|as|with) JSON(.|)",
    "(Explain|Define|Describe) {} (in|as) JSON",
    "Give me {} as (JSON|a JSON object)",
)
FOLLOW_WHY: Final[tuple[str, ...]] = (
    "Why(| is that important| does it matter| is it needed| do we need it| is it useful)?",
    "And why?",
    "What is it good for?",
    "Why is this (important|needed)?",
)
FOLLOW_HOW: Final[tuple[str, ...]] = (
    "How does (it|this|that) work?",
    "And how does it work?",
    "How?",
    "How is it done?",
)
_UNKNOWN: Final[tuple[str, ...]] = (
    "Who (invented|discovered|is|was|likes) {}?",
    "Where (is|can I find|can I buy) {}?",
    "When was {} (invented|built|born|discovered)?",
    "How (do|can) I (cook|bake|build|repair|draw|buy|clean|play) {}?",
    "How (old|big|far|tall|heavy|expensive) is {}?",
    "Write (an essay|a song|a letter|a program) about {}",
    "What is the (capital|population|history|colour|price|weather|president|meaning) of {}?",
    "What (do|does) {} eat?",
    "Do you like {}?",
    "Translate {} into French",
    "What is the best {}?",
    "Can you (recommend|find|send|show) me {}?",
    "Who (won|lost|played|wrote|painted|directed|founded) {} in (1966|1990|2004|2018|2022)?",
    "Who (won|wrote|built|owns|killed|married|founded|painted) {}?",
    "What (happened|changed) (to|with|in) {} (in 1812|in 1945|last year|yesterday|today)?",
    "How (do|can|should) I (fix|open|grow|learn|make|get|sell|paint|wash|find|pay for) {}?",
    "How (many|much) (legs|people|money|water|time|rooms) (has|does) {} (|have|need)?",
    "(Should|Can|May) I (eat|buy|visit|marry|sell|keep|call) {}?",
    "What (time|day|year|size|shape|animal|language) is (it in |)(|best for ){}?",
    "(Give|Send) me (a list of|the price of|a picture of|news about|facts about) {}",
    "(Is|Was) {} (dangerous|alive|healthy|true|green|round|expensive|famous)?",
    "My (friend|sister|boss|neighbour) (likes|hates|bought|lost) {}(. What now?|, why?|)",
    "Which {} (is|was) the (first|biggest|oldest|cheapest|best)?",
    "Solve {} for me",
    "Summarise {}",
)
_UNKNOWN_THINGS: Final = read_words("unknown_things", "|")
UNKNOWN_ANSWER: Final = (
    "Sorry, I do not know that. I am only a small demo model, and my subjects are prefill, decode, "
    "the KV cache and pdserve."
)
_BEFORE: Final = (
    "Please ",
    "Hi, ",
    "Hello! ",
    "Hey, ",
    "Quick question: ",
    "So ",
    "And ",
    "Ok, ",
    "I have a question. ",
    "I wonder: ",
    "Tell me: ",
    "Well, ",
    "One more thing: ",
    "Sorry, but ",
    "Can you tell me: ",
)
_AFTER: Final = (
    " Please.",
    " Thanks!",
    " please",
    " In simple words.",
    " Be brief.",
    " Answer briefly.",
    " I am new to this.",
    " Thank you.",
    " In short?",
    " Explain it simply.",
    " In one sentence.",
)
_LITTLE_WORDS: Final = frozenset(read_words("little_words"))
_SYLLABLES: Final = read_words("syllables")


def expand(pattern: str, rng: Random) -> str:
    """Replace every `(a|b)` of `pattern` by one of its alternatives."""
    return _ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), pattern)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def fill(forms: tuple[str, ...], name: str, rng: Random) -> str:
    """A question about `name` in one of the `forms`."""
    return _capital(expand(rng.choice(forms), rng).format(name))


def unknown_question(rng: Random) -> str:
    """A question about something that no answer of ours covers, often an invented word."""
    if rng.random() < 0.5:
        thing = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3)))
        thing = rng.choice(("", "a ", "the ")) + (_capital(thing) if rng.random() < 0.3 else thing)
    else:
        thing = rng.choice(_UNKNOWN_THINGS)
    forms = rng.choice((_UNKNOWN, _UNKNOWN, WHAT, WHAT, WHY, HOW))
    return fill(forms, thing, rng)


def sloppy(text: str, rng: Random) -> str:
    """`text` as somebody might type it: other case, no full stop, a small word or letter lost."""
    if rng.random() < 0.15:
        head = rng.choice(_BEFORE)
        text = head + (text[:1].lower() + text[1:] if rng.random() < 0.5 else text)
    if rng.random() < 0.15:
        text = (
            text + ("" if text[-1:] in "?.!" else rng.choice((".", "?", ","))) + rng.choice(_AFTER)
        )
    words = text.split(" ")
    little = [i for i, word in enumerate(words) if word.lower() in _LITTLE_WORDS]
    if len(words) > 3 and little and rng.random() < 0.15:
        del words[rng.choice(little)]
        text = " ".join(words)
    if len(text) > 12 and rng.random() < 0.06:
        at = rng.randrange(len(text) - 1)
        text = text[:at] + text[at + 1 :]
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    if rng.random() < 0.2:
        text = text.lower()
    return text
