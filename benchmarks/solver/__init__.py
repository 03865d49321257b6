"""How well and how fast graphs are scheduled, beside what is published and what others do."""
