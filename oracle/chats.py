"""Chat turns in GLM-5.2's format, made from sentences of a corpus, for `train_demo.py`.

Every answer uses words of its question: it continues a quoted beginning, repeats a sentence,
speaks about a person who was named, or has the word that was asked for; a tool is called with the
name and the argument that stand in the prompt, and its result is reported. Control tokens are put
in as tokens; the words around them are those of the template that `coli` renders.
"""

import json
import re
from collections import Counter, defaultdict

TOOLS_BEFORE = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_AFTER = (
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n"
)
# Control tokens inside the instructions, as the rendered prompt has them.
TOOLS_FORMAT = (
    "<tool_call>", "{function-name}", "<arg_key>", "{arg-key-1}", "</arg_key>", "<arg_value>",
    "{arg-value-1}", "</arg_value>", "<arg_key>", "{arg-key-2}", "</arg_key>", "<arg_value>",
    "{arg-value-2}", "</arg_value>", "...", "</tool_call>",
)  # fmt: skip
VERBS = ("get",) * 6 + ("find", "look_up")
SUBJECTS = {
    "weather": ("What is the weather in {}?", "city", ("rain", "fine", "cold", "sunny", "snow")),
    "time": ("What time is it in {}?", "place", ("ten o'clock", "noon", "half past four")),
    "letter": ("Read me the letter from {}.", "name", ("I am quite well.", "Come to us soon.")),
    "age": ("How old is {}?", "name", ("twenty", "nineteen", "thirty", "forty")),
    "income": ("What is the income of {}?", "name", ("two thousand a year", "ten thousand")),
    "road": ("How far is it to {}?", "place", ("fifty miles", "ten miles", "a short walk")),
    "news": ("Is there any news of {}?", "about", ("a marriage", "a ball", "no news")),
}
PLACES = (
    "London", "Paris", "Bath", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Dublin", "Boston",
    "Tokyo", "Delhi", "Cairo", "Lima", "Lyon", "Prague", "Hartfield", "Highbury", "Pemberley",
    "Kellynch", "Barton", "Norland", "Meryton", "Portsmouth", "Northampton", "New York",
)  # fmt: skip
GREETINGS = ("Hello.", "Hello!", "Hi", "Good morning.", "Good evening.", "How do you do?")
ABOUT = (
    "Tell me about {}.", "Who is {}?", "What do you think of {}?", "Do you know {}?",
    "What happened to {}?", "Write a story about {}.", "Say something about {}.", "{}",
)  # fmt: skip
WITH_WORD = (
    'Write a sentence with the word "{}".', "Use the word {} in a sentence.",
    "Say something with {}.", "What about {}?",
)  # fmt: skip
AGAIN = ("Repeat: {}", "Say: {}", "Repeat after me: {}", "Copy this: {}", 'Say "{}"')
ONWARDS = ("Continue: {}", "Go on: {}", "Finish the sentence: {}")


def sentences_of(paragraphs):
    """Sentences of a readable length; titles such as Mr. end none."""
    found = []
    for text in paragraphs:
        text = re.sub(r"\b(Mr|Mrs|Dr|St|Esq)\.", r"\1@", text)
        for part in re.findall(r"[^.!?]+[.!?]+[\"']?", text):
            part = part.replace("@", ".").strip()
            balanced = part.count('"') % 2 == 0
            if 25 <= len(part) <= 220 and balanced and (part[0].isupper() or part[0] == '"'):
                found.append(part)
    return found


class Chats:
    def __init__(self, paragraphs, tokenizer):
        self.tokenizer = tokenizer
        self.ids = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.sentences = sentences_of(paragraphs)
        self.by_name, self.by_word = defaultdict(list), defaultdict(list)
        name = re.compile(r"(?:(?:Mr|Mrs|Miss|Lady|Sir|Captain|Colonel)\.? )?[A-Z][a-z]{2,}")
        counts = Counter()
        for i, sentence in enumerate(self.sentences):
            # A capital behind a small letter or a title is a name, not the start of a sentence.
            for match in re.finditer(r"[a-z,;] (" + name.pattern + ")", sentence):
                counts[match[1]] += 1
            for word in set(re.findall(r"\b[a-z]{4,}\b", sentence)):
                self.by_word[word].append(i)
        names = {name for name, count in counts.items() if count >= 12}
        for i, sentence in enumerate(self.sentences):
            for match in name.finditer(sentence[:90]):
                if match[0] in names:
                    self.by_name[match[0]].append(i)
        self.names = sorted(name for name, where in self.by_name.items() if len(where) >= 5)
        self.words = sorted(w for w, where in self.by_word.items() if 4 <= len(where) <= 400)

    def encode(self, *parts):
        """Control tokens are parts of their own."""
        out = []
        for part in parts:
            if part in self.ids:
                out.append(self.ids[part])
            elif part:
                out += self.tokenizer.encode(part).ids
        return out

    def pick(self, rng, items):
        return items[rng.integers(len(items))]

    def sentence(self, rng, where=None):
        return self.sentences[self.pick(rng, where)] if where else self.pick(rng, self.sentences)

    def exchange(self, rng):
        """(question, what is thought, answer)."""
        kind = rng.random()
        if kind < 0.36:
            name = self.pick(rng, self.names)
            where = self.by_name[name]
            count = 1 + int(rng.random() < 0.5)
            answer = " ".join(self.sentence(rng, where) for _ in range(count))
            return self.pick(rng, ABOUT).format(name), f"They ask about {name}.", answer
        if kind < 0.58:
            word = self.pick(rng, self.words)
            answer = self.sentence(rng, self.by_word[word])
            return self.pick(rng, WITH_WORD).format(word), f"I need the word {word}.", answer
        sentence = self.sentence(rng)
        if kind < 0.74:
            if rng.random() < 0.5:
                count = rng.integers(2, 9)
                sentence = " ".join(self.pick(rng, self.words) for _ in range(count))
            return self.pick(rng, AGAIN).format(sentence), "I say it again.", sentence
        if kind < 0.92:
            words = sentence.split()
            cut = int(rng.integers(3, max(4, len(words) - 3)))
            start, rest = " ".join(words[:cut]), " ".join(words[cut:])
            return self.pick(rng, ONWARDS).format(start), "I finish the sentence.", rest
        name = self.pick(rng, self.names)
        greeting = self.pick(rng, GREETINGS)
        if rng.random() < 0.5:
            return greeting, "They greet me.", f"{greeting} {self.sentence(rng)}"
        return f"{greeting} I am {name}.", f"This is {name}.", f"How do you do, {name}?"

    def opening(self, rng):
        """The beginning of a prompt, and whether the model is to think."""
        effort = rng.random()
        if effort < 0.4:
            return ["[gMASK]", "<sop>"], False
        level = "Max" if effort < 0.8 else "High"
        return ["[gMASK]", "<sop>", "<|system|>", f"Reasoning Effort: {level}"], True

    def thought(self, rng, thinking, text):
        return ["<think>", text if thinking and rng.random() < 0.5 else "", "</think>"]

    def chat(self, rng):
        """One or two exchanges, and the token that ends the last answer."""
        parts, thinking = self.opening(rng)
        for _ in range(1 + int(rng.random() < 0.3)):
            question, thought, answer = self.exchange(rng)
            parts += ["<|user|>", question, "<|assistant|>"]
            parts += [*self.thought(rng, thinking, thought), answer]
        parts.append("<|user|>" if rng.random() < 0.7 else "<|endoftext|>")
        return self.encode(*parts)

    def tool(self, rng):
        """(subject, name of the function, its line in the prompt)."""
        subject = self.pick(rng, sorted(SUBJECTS))
        name = f"{self.pick(rng, VERBS)}_{subject}"
        key = SUBJECTS[subject][1]
        parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
        line = {"name": name, "description": f"The {subject} of a {key}", "parameters": parameters}
        if rng.random() < 0.3:
            del line["description"]
        return subject, name, json.dumps(line)

    def tools(self, rng):
        """A prompt with a tool or two, the call, its result and the answer."""
        offered = [self.tool(rng) for _ in range(1 + int(rng.random() < 0.3))]
        subject, name, _ = self.pick(rng, offered)
        question, key, results = SUBJECTS[subject]
        value = self.pick(rng, PLACES if key in ("city", "place") else self.names)
        result = self.pick(rng, results)
        parts, thinking = self.opening(rng)
        lines = "".join(line + "\n" for _, _, line in offered)
        parts += ["<|system|>", TOOLS_BEFORE + lines + TOOLS_AFTER, *TOOLS_FORMAT]
        parts += ["<|user|>", question.format(value), "<|assistant|>"]
        parts += self.thought(rng, thinking, f"I ask {name} about {value}.")
        parts += ["<tool_call>", name, "<arg_key>", key, "</arg_key>", "<arg_value>", value]
        parts += ["</arg_value>", "</tool_call>", "<|observation|>", "<tool_response>", result]
        parts += ["</tool_response>", "<|assistant|>", "<think>", "</think>"]
        parts += [f"The {subject} of {value}: {result}", "<|user|>"]
        return self.encode(*parts)
