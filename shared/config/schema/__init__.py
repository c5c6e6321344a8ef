"""What config sections are made of: their base class, schedules, and messages for values that do not fit."""
