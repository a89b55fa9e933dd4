"""What a GPU trains in how many milliseconds: a vision-language-action model in GR00T's shape from real pictures, rung by rung."""
