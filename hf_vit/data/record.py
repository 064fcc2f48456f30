"""What is said about a data set wherever a score on it is reported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataRecord:
    """The name, origin and license of a data set.

    Args:
        name: Its public name.
        identifier: Short name for the metadata of a model card, or the id on the Hub.
        license: License of the data.
        description: A few sentences with source and sizes.
        test: The images that are scored, in words.
        split: The split that they are: "test", "validation" or "train".
    """

    name: str
    identifier: str
    license: str
    description: str
    test: str
    split: str = "test"
