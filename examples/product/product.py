"""A product in front of a run: users ask it for words, and like those with many vowels. It knows nothing of training.

python product.py http://127.0.0.1:8450/v1 KEY_FILE
"""

import random
import sys
import threading
import time
from pathlib import Path

import httpx
from openai import APIError, OpenAI

USERS, LENGTH = 32, 6
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def use(run: httpx.Client, question: str) -> float:
    """A session: one word, and what the user thinks of it."""
    session = run.post("/sessions", json={"task": question}).raise_for_status().json()
    with OpenAI(base_url=session["base_url"], api_key=session["api_key"], timeout=60) as client:
        messages = [{"role": "user", "content": question}]
        word = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
    reward = sum(letter in "aeiou" for letter in word[:LENGTH]) / LENGTH
    run.post(f"/sessions/{session['id']}/reward", json={"reward": reward}).raise_for_status()
    return reward


def user(address: str, key: Path, number: int) -> None:
    """Asks one question after the other. Tries again later when there is no answer: the run may not serve yet."""
    rng, headers = random.Random(number), {"Authorization": f"Bearer {key.read_text().strip()}"}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as run:
        while True:
            question = f"a word for {''.join(rng.choices(LETTERS[:3], k=2))}"
            try:
                use(run, question)
            except (httpx.HTTPError, APIError) as error:
                print(f"user {number}: {error}", file=sys.stderr)
                time.sleep(1)


def main() -> None:
    address, key = sys.argv[1], Path(sys.argv[2])
    for number in range(USERS):
        threading.Thread(target=user, args=(address, key, number), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
