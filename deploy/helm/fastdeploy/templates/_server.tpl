{{- /* The pod of a server: (dict "root" $ "component" COMPONENT "arguments" LIST). */}}
{{- define "fastdeploy.server" -}}
{{- $values := .root.Values -}}
metadata:
  labels:
    app.kubernetes.io/name: fastdeploy
    app.kubernetes.io/instance: {{ .root.Release.Name }}
    app.kubernetes.io/component: {{ .component }}
  annotations: {prometheus.io/scrape: "true", prometheus.io/port: {{ $values.port | quote }}}
spec:
  # A few seconds more than running answers get, for preStop and for the engine to end.
  terminationGracePeriodSeconds: {{ add $values.graceSeconds 20 }}
  automountServiceAccountToken: false
  securityContext: {runAsNonRoot: true, runAsUser: 1000, fsGroup: 1000, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: server
      image: {{ $values.image | quote }}
      imagePullPolicy: {{ $values.imagePullPolicy }}
      args:
        - serve
        - {{ printf "/models/%s" $values.model | quote }}
        - --host=0.0.0.0
        - --port={{ $values.port }}
        - --timeout-graceful-shutdown={{ $values.graceSeconds }}
{{- range concat .arguments $values.serveArguments }}
        - {{ . | quote }}
{{- end }}
{{- if $values.keySecret }}
      env:
        - name: FD_API_KEY
          valueFrom: {secretKeyRef: {name: {{ $values.keySecret }}, key: api-keys}}
        - name: FD_ADMIN_KEY
          valueFrom: {secretKeyRef: {name: {{ $values.keySecret }}, key: admin-key, optional: true}}
{{- end }}
      ports:
        - {name: http, containerPort: {{ $values.port }}}
      # Until it succeeds, the other probes do not count.
      startupProbe:
        httpGet: {path: /health/ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: {{ div $values.startupSeconds 5 }}
      readinessProbe:
        httpGet: {path: /health/ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 2
      # The engine's progress, also while it drains. A dead engine the server starts again itself.
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      lifecycle:
        # Routers' probes see that it drains, and others hear that this pod ends, while it still
        # answers; then SIGTERM lets running answers end.
        preStop:
          exec:
            command:
              - python
              - -c
              - |
                import os, time, urllib.request
                key = os.environ.get("FD_ADMIN_KEY")
                if key:
                    headers = {"Authorization": f"Bearer {key}"}
                    url = "http://127.0.0.1:{{ $values.port }}/drain"
                    urllib.request.urlopen(urllib.request.Request(url, b"", headers), timeout=5)
                time.sleep(5)
      securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      resources:
        requests: {{ toJson $values.resources.requests }}
{{- if $values.devices }}
        limits: {{ toJson $values.devices }}
{{- end }}
      volumeMounts:
        - {name: models, mountPath: /models, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
{{- if $values.prefill.perServer }}
        - {name: blocks, mountPath: /kv}
{{- end }}
  volumes:
    - name: models
      persistentVolumeClaim: {claimName: {{ $values.modelClaim }}, readOnly: true}
    # Ranks and processes share memory.
    - name: shm
      emptyDir: {medium: Memory}
{{- if $values.prefill.perServer }}
    - name: blocks
      persistentVolumeClaim: {claimName: {{ required "prefill.perServer needs prefill.blockClaim" $values.prefill.blockClaim }}}
{{- end }}
{{- end }}
