"""Makes four silos of short texts, one for each domain, from the sdist of vaderSentiment 3.2.1
(MIT).

    pip download --no-deps --no-binary :all: vaderSentiment==3.2.1
    python -m benchmarks.sentiment_domains vaderSentiment-3.2.1.tar.gz data/sentiment --rows 750

Ten people rated each text from -4 to 4 (Hutto and Gilbert, VADER. ICWSM, 2014). Written are
`tweets.parquet`, `movies.parquet`, `products.parquet` and `news.parquet` with the columns `text`,
`rating` (mean of the ten) and `label`: positive where the rating is above 0, negative below; texts
with a rating of 0 are left out. `--rows` takes so many of each domain, drawn with seed 0.
"""

import argparse
import io
import random
import tarfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DOMAINS = {
    "tweets": "tweets_GroundTruth.txt",
    "movies": "movieReviewSnippets_GroundTruth.txt",
    "products": "amazonReviewSnippets_GroundTruth.txt",
    "news": "nytEditorialSnippets_GroundTruth.txt",
}
INNER = "hutto_ICWSM_2014.tar.gz"


def texts(sdist: Path) -> dict[str, list[tuple[str, float]]]:
    """Return texts and their mean ratings by domain."""
    with tarfile.open(sdist) as outer:
        member = next(name for name in outer.getnames() if name.endswith(INNER))
        packed = outer.extractfile(member)
        assert packed is not None
        content = packed.read()
    found = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as inner:
        names = [name for name in inner.getnames() if not Path(name).name.startswith("._")]
        for domain, file in DOMAINS.items():
            opened = inner.extractfile(next(name for name in names if Path(name).name == file))
            assert opened is not None
            lines = opened.read().decode("utf-8", errors="replace").splitlines()
            fields = [line.split("\t") for line in lines if line.count("\t") >= 2]
            found[domain] = [(text, float(rating)) for _, rating, text, *_ in fields]
    return found


def main() -> None:
    """Write the four files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sdist", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, help="of each domain; by default all")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for domain, rated in texts(given.sdist).items():
        chosen = [(text.strip(), rating) for text, rating in rated if rating and text.strip()]
        random.Random(0).shuffle(chosen)
        chosen = chosen[: given.rows]
        labels = ["positive" if rating > 0 else "negative" for _, rating in chosen]
        columns = {
            "text": [text for text, _ in chosen],
            "rating": [rating for _, rating in chosen],
            "label": labels,
        }
        pq.write_table(pa.table(columns), given.out / f"{domain}.parquet")
        print(domain, len(chosen), dict(Counter(labels)))


if __name__ == "__main__":
    main()
