"""The OpenAI API: routes, the bodies they accept (schemas/), and how answers are made and shown."""
