"""Parts of config sections: their base class, schedules, and messages for values that do not fit."""
