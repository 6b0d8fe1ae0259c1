"""What a study says in the end: the answer, and pages of HTML made from it."""
