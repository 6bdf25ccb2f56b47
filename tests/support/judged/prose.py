r"""Hand-judged answers for `numeric` and `choice` in prose: (response, label, score, reason)."""

Kinds = list[tuple[str, list[tuple[str, str]], list[tuple[str, str]]]]

NUMBERS: Kinds = [
    (
        "what is said behind an answer is not the answer",
        [
            ("Answer: 42 (3 steps)", "42"),
            ("The answer is 42 minutes (0.7 hours)", "42"),
            ("Therefore, the area is 42 cm\u00b2 (about 6.5 in\u00b2).", "42"),
            ("The volume is 42 m\u00b3.", "42"),
            ("The answer is 42. It has no 7 in it.", "42"),
            ("The answer is 42 and it took 3 steps", "42"),
            ("### Final Answer\n\n**42**\n\nTell me if you need 1 more example!", "42"),
            ("**Answer**\n42 apples\nThis took 3 steps.", "42"),
            ("## Answer\nWe have 3 apples.\nThe total is 42.", "42"),
        ],
        [("The answer is 42 apples and 3 pears", "42"), ("## Answer\nFirst we take 42 apples.\nThe total is 3.", "42")],
    ),
    (
        "an answer is announced in other languages, and may be denied",
        [
            ("答案是42\uff0c共有3种方法\u3002", "42"),
            ("所以答案是42\u3002一共用了3步\u3002", "42"),
            ("最终答案为 42 \u3002检验\uff1a6*7=42\uff0c见第1页", "42"),
            ("答\uff1a小明有42个苹果\uff0c花了3元\u3002", "42"),
            ("答案不是41\uff0c而是42\u3002用了3步\u3002", "42"),
            ("Die Antwort lautet 42. Das sind 2 Ziffern.", "42"),
            ("Die Antwort ist 42, weil 6 mal 7 zwei Faktoren hat: 3 Schritte", "42"),
            ("La réponse est 42. On a utilisé 3 étapes.", "42"),
            ("La respuesta es 42. Se usaron 3 pasos.", "42"),
            ("\u041e\u0442\u0432\u0435\u0442: 42\n\u041f\u0440\u043e\u0432\u0435\u0440\u043a\u0430: \u0448\u0430\u0433 3", "42"),
            ("답은 42입니다. 3단계", "42"),
            ("答えは42です\u30023通りで確認した", "42"),
            ("The answer is 42 out of 100", "42"),
        ],
        [
            ("答案不是42", "42"),
            ("答案是41\uff0c不是42", "42"),
            ("The answer isn't 42.", "42"),
            ("It isn\u2019t 42", "42"),
            ("Die Antwort ist nicht 42.", "42"),
            ("Die Antwort ist 41 oder 42", "42"),
            ("答案是41或42", "42"),
            ("答案是41\uff0c或者42", "41"),
            ("答案是41\uff0c或者42", "42"),
        ],
    ),
    (
        "a decimal comma, or thousands with points",
        [
            ("The total is 1.234,56", "1234.56"),
            ("It costs €1.234,56.", "1234.56"),
            ("1.234.567", "1234567"),
            ("It is 12,345.", "12345"),
            ("7, 8", "8"),
        ],
        [
            ("The total is 1.234,56", "56"),
            ("The answer is 3,14 euros", "14"),
            ("0,5", "5"),
            ("$1,50", "50"),
            ("1,234,56", "56"),
            ("1 234,56", "56"),
            ("3.141.592", "592"),
            ("192.168.0.1", "1"),
        ],
    ),
    (
        "a bound is not its number",
        [
            ("=> 5", "5"),
            ("So 2+3 -> 5", "5"),
            ("<answer> 5 </answer>", "5"),
            ("<b>5</b>", "5"),
            ("Result:\n> 5", "5"),
            ("5<br>", "5"),
            ("5 > 3 so the answer is 5", "5"),
        ],
        [
            ("x > 5", "5"),
            ("<5", "5"),
            ("≥5", "5"),
            (r"x \le 5", "5"),
            ("5 < x", "5"),
            ("5 <= x", "5"),
            ("±5", "5"),
            ("It is between 3 and 5", "5"),
            ("I think 4 or 5", "5"),
        ],
    ),
    (
        "a part of an expression is not its value",
        [
            ("f(3) = 5", "5"),
            ("option (5)", "5"),
            ("Answer - 5", "5"),
            ("price: $-5", "-5"),
            ("total = +5", "5"),
            ("x = 5 (m)", "5"),
        ],
        [("2x+5", "5"), ("n-5", "5"), ("x_5", "5"), ("log_5", "5"), ("log(5)", "5"), ("f(5)", "5"), ("√5", "5")],
    ),
    (
        "a quantity in two units, and letters that are no units",
        [
            ("It takes 5 hours 30 minutes.", "330 minutes"),
            ("2 hours and 30 minutes", "2.5 hours"),
            ("2 feet 6 inches", "30 inches"),
            ("5 dollars and 50 cents", "5.5 dollars"),
            ("5 apples and 3 pears", "3"),
            ("There are 5 A students", "5"),
            ("The answer is 42 (see step 5)", "42"),
        ],
        [("5 hours 30 minutes", "30"), ("5h30", "30"), ("2 feet 6 inches", "6"), ("5 dollars and 50 cents", "50 cents")],
    ),
    ("a label as JSON", [("5", '"5"'), ("5", "[5]"), ("5", '["5"]')], [("6", '["5"]')]),
]
CHOICES: Kinds = [
    (
        "a refused letter is not chosen",
        [
            ("The answer isn't A, it's B", "B"),
            ("It can't be A. It's (B).", "B"),
            ("The answer is not A but B", "B"),
            ("A... no, B", "B"),
            ("Answer: B\n\nExplanation: A is wrong because it has no C.", "B"),
            ("A. Wait, actually B", "B"),
        ],
        [
            ("The answer isn't B", "B"),
            ("The answer can't be B", "B"),
            ("The answer cannot be B", "B"),
            ("The answer is never B", "B"),
            ("The answer is anything but B", "B"),
            ("I would not choose B", "B"),
            ("Don't pick B", "B"),
            ("B... wait, C", "B"),
            ("It's not B", "B"),
            ("答案不选B", "B"),
        ],
    ),
    (
        "the letter is stated",
        [
            ("It's B", "B"),
            ("I considered A. It is B.", "B"),
            ("A is wrong.\nTherefore, B", "B"),
            ("Correct option: B", "B"),
            ("The correct letter is B.", "B"),
            ("Ans: (B)", "B"),
            ("B选项", "B"),
            ("Svaret är B", "B"),
            ("Răspunsul este B", "B"),
            ("Odpověď: B", "B"),
            ("Vastaus: B", "B"),
            ("η απάντηση είναι B", "B"),
            ("คำตอบคือ B", "B"),
            ("התשובה היא B", "B"),
            ("پاسخ: B", "B"),
            ("উত্তর: B", "B"),
            ("जवाब: B", "B"),
        ],
        [
            ("Option C", "B"),
            ("Correct: C", "B"),
            ("ans: C", "B"),
            ("Therefore, C.", "B"),
            ("Vitamin B", "B"),
            ("It is C\nnot B", "B"),
        ],
    ),
]


def _rows(kinds: Kinds) -> list[tuple[str, str, float | str, str]]:
    return [
        (response, label, score, reason)
        for reason, right, wrong in kinds
        for score, pairs in ((1.0, right), (0.0, wrong))
        for response, label in pairs
    ]


NUMERIC, CHOICE = _rows(NUMBERS), _rows(CHOICES)
