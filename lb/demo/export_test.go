package demo

// For TestMain, which is outside this package because its program is also the agent.
const SpeakerOptions = speakerOptions

var Speak = speak
