"""Questions for a model of the user's, where no file with others is given."""

_SUBJECTS = (
    *("a queue", "a binary tree", "a bank account", "a library", "a weather station"),
    *("a chess clock", "an elevator", "a shopping cart", "a parking garage", "a thermostat"),
    *("a music player", "a train timetable"),
)
_TASKS = (
    "Write a Python class for {}, with type hints and three methods.",
    "Write a JSON object with eight fields that describes {}.",
    "Explain in two short paragraphs what {} is and how it works.",
    "Write a SQL table for {} and five rows of sample data.",
    "List ten facts about {}, numbered, one short sentence each.",
    "Tell a very short story in which {} plays the main part.",
    "Translate into German and French: The price of {} has doubled within four years.",
    "A shop sells {} for 240 euros with a discount of 15 percent and 19 percent tax. Work out the "
    "final price step by step.",
)
# Tasks in turn, so that the first few already are of several kinds.
QUESTIONS = tuple(task.format(subject) for subject in _SUBJECTS for task in _TASKS)
