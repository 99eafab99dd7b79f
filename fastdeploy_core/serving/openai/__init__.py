"""The OpenAI API: routes, the bodies they accept (schemas/), and how an answer is made and
shown."""
